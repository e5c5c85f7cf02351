// Changes to the job. Each needs the control token, and a confirmation.

import { post } from "./api.js";
import { bytes, card, clock, count, empty, h, replace } from "./dom.js";

// Kept only while this page is open.
let token = "";
const outcomes = [];

export function control(root, live) {
  if (!live.job?.control) {
    replace(root, h("h1", null, "Control"), card("Off", {}, empty("Control is off: this server was started without a control token, or the job does not run in its process.")));
    return {};
  }
  const log = h("ol", { class: "outcomes", "aria-live": "polite" });
  const ask = h("dialog", { class: "confirm", "aria-labelledby": "confirm-title" });
  const secret = h("input", { type: "password", autocomplete: "off", id: "control-token", required: true });
  secret.value = token;
  secret.addEventListener("input", () => { token = secret.value; });
  const now = h("span", { class: "soft" });

  function report(text, isFailed = false) {
    outcomes.unshift({ text, isFailed, at: clock(Date.now()) });
    showLog();
  }
  const showLog = () => replace(log, outcomes.length ? outcomes.map((each) => h("li", { class: each.isFailed ? "failed" : null }, h("span", { class: "soft" }, `${each.at} `), each.text)) : h("li", { class: "soft" }, "No changes yet."));

  function confirm(title, text, button) {
    return new Promise((answer) => {
      replace(ask, h("form", { method: "dialog" },
        h("h2", { id: "confirm-title" }, title), h("p", null, text),
        h("div", { class: "confirm-buttons" },
          h("button", { value: "no", autofocus: true }, "Cancel"),
          h("button", { value: "yes", class: "primary" }, button))));
      ask.returnValue = "no";
      ask.onclose = () => answer(ask.returnValue === "yes");
      ask.showModal();
    });
  }

  async function change(what, body, title, text, button, done) {
    if (!token) {
      secret.focus();
      return report("The control token is missing.", true);
    }
    if (!(await confirm(title, text, button))) return;
    report(`${title} …`);
    try {
      const found = await post(`/api/control/${what}`, body, token);
      outcomes.shift();
      report(done(found));
      live.refresh();
    } catch (error) {
      outcomes.shift();
      report(`${error.message}${error.next ? ` Next: ${error.next}` : ""}`, true);
    }
  }

  const name = h("input", { type: "text", id: "savepoint-name", autocomplete: "off", spellcheck: "false", pattern: "[A-Za-z0-9][A-Za-z0-9_\\-]{0,63}", placeholder: "date and time", maxlength: 64 });
  const many = h("input", { type: "number", id: "parallelism", min: 1, max: live.job.job?.max_parallelism ?? 32768, required: true });
  many.value = live.job.parallelism ?? 1;
  const group = live.lead?.group ?? null;
  const to = h("select", { id: "successor" }, h("option", { value: "" }, "any, a hot one first"),
    (group?.standbys ?? []).map((each) => h("option", { value: each.identity, disabled: each.refusal !== null }, `${each.host}, pid ${each.pid}${each.refusal === null ? "" : ": would be refused"}`)));
  const last = h("input", { type: "text", id: "stop-savepoint", autocomplete: "off", spellcheck: "false", pattern: "[A-Za-z0-9][A-Za-z0-9_\\-]{0,63}", placeholder: "none", maxlength: 64 });
  const form = (fields, button, cls, run) => h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); run(); } }, fields, h("button", { type: "submit", class: cls }, button));
  const field = (label, input) => h("label", { class: "field grow" }, h("span", null, label), input);

  replace(root, h("div", { class: "title-row" }, h("h1", null, "Control"), now),
    card("Token", {}, h("div", { class: "ask" }, field("Control token: kept while this page is open, sent only with the changes below", secret))),
    h("div", { class: group ? "four-up" : "three-up" },
      card("Savepoint", {}, h("p", { class: "soft" }, "Writes the newest epoch to its own folder. The job continues."),
        form(field("Name", name), "Take a savepoint", "primary", () => change("savepoint", { name: name.value.trim() || null }, "Take a savepoint", "It is written beside the checkpoint.", "Take it",
          (found) => `Savepoint of epoch ${count(found.epoch)}: ${count(found.rows)} rows, ${bytes(found.bytes)}, ${found.url}`))),
      card("Rescale", {}, h("p", { class: "soft" }, "Changes the number of subtasks from the next epoch on. No state is rewritten."),
        form(field("Subtasks", many), "Rescale", "primary", () => change("rescale", { parallelism: Number(many.value) }, `Rescale to ${count(Number(many.value))}`, "It takes effect with the next epoch.", "Rescale",
          (found) => `Rescaling to ${count(found.parallelism)} subtasks with the next epoch`))),
      card("Rebalance", {}, h("p", { class: "soft" }, "Cuts the ranges of key groups so that subtasks carry equal load, from the next epoch on. No state is rewritten."),
        form(null, "Rebalance", "primary", () => change("rebalance", {}, "Rebalance", "The ranges stay if a change would gain little.", "Rebalance",
          (found) => `${found.groups_moved ? `${count(found.groups_moved)} key groups move` : "The ranges stay"}${found.limit ? `: ${found.limit}` : ""}`))),
      group ? card("Hand over", {}, h("p", { class: "soft" }, "Passes the lead to a standby after the current epoch. This driver waits then."),
        form(field("Standby", to), "Hand over", "primary", () => change("handover", { to: to.value || null }, "Hand over", "The current epoch is finished first.", "Hand over",
          (found) => `${found.successor.host}, pid ${found.successor.pid}, takes over`))) : null,
      card("Stop", {}, h("p", { class: "soft" }, "Ends the job after the current epoch. Nothing is lost. This server ends with the job."),
        form(field("Name of a savepoint", last), "Stop the job", "danger", () => change("stop", { savepoint: last.value.trim() || null }, "Stop the job", "It ends after the current epoch. To continue, start the program again.", "Stop it",
          (found) => `Stopping${found.savepoint ? `, with a savepoint at ${found.savepoint}` : ""}`)))),
    card("Results", {}, log), ask);

  const update = () => { now.textContent = `${live.job.status}, ${count(live.job.parallelism)} subtasks`; };
  showLog();
  update();
  return { update };
}
