// What changes the job. Each needs the control token, and is asked about once more.

import { post } from "./api.js";
import { bytes, card, clock, count, empty, h, replace } from "./dom.js";

// For as long as this page is open, and nowhere else.
let token = "";
const outcomes = [];

export function control(root, live) {
  if (!live.job?.control) {
    replace(root, h("h1", null, "Control"), card("Off", {}, empty("Control is off: this server was started without a control token, or the job does not run here.")));
    return {};
  }
  const log = h("ol", { class: "outcomes", "aria-live": "polite" });
  const ask = h("dialog", { class: "confirm", "aria-labelledby": "confirm-title" });
  const secret = h("input", { type: "password", autocomplete: "off", id: "control-token", required: true });
  secret.value = token;
  secret.addEventListener("input", () => { token = secret.value; });
  const now = h("span", { class: "soft" });

  function told(text, isFailed = false) {
    outcomes.unshift({ text, isFailed, at: clock(Date.now()) });
    tell();
  }
  const tell = () => replace(log, outcomes.length ? outcomes.map((each) => h("li", { class: each.isFailed ? "failed" : null }, h("span", { class: "soft" }, `${each.at} `), each.text)) : h("li", { class: "soft" }, "Nothing was asked for yet."));

  function confirmed(title, says, button) {
    return new Promise((answer) => {
      replace(ask, h("form", { method: "dialog" },
        h("h2", { id: "confirm-title" }, title), h("p", null, says),
        h("div", { class: "confirm-buttons" },
          h("button", { value: "no", autofocus: true }, "Cancel"),
          h("button", { value: "yes", class: "primary" }, button))));
      ask.returnValue = "no";
      ask.onclose = () => answer(ask.returnValue === "yes");
      ask.showModal();
    });
  }

  async function change(what, body, title, says, button, done) {
    if (!token) {
      secret.focus();
      return told("The control token is missing.", true);
    }
    if (!(await confirmed(title, says, button))) return;
    told(`${title} …`);
    try {
      const found = await post(`/api/control/${what}`, body, token);
      outcomes.shift();
      told(done(found));
      live.refresh();
    } catch (error) {
      outcomes.shift();
      told(`${error.message}${error.next ? ` Next: ${error.next}` : ""}`, true);
    }
  }

  const name = h("input", { type: "text", id: "savepoint-name", autocomplete: "off", spellcheck: "false", pattern: "[A-Za-z0-9][A-Za-z0-9_\\-]{0,63}", placeholder: "by the time of day", maxlength: 64 });
  const many = h("input", { type: "number", id: "parallelism", min: 1, max: live.job.job?.max_parallelism ?? 32768, required: true });
  many.value = live.job.parallelism ?? 1;
  const last = h("input", { type: "text", id: "stop-savepoint", autocomplete: "off", spellcheck: "false", pattern: "[A-Za-z0-9][A-Za-z0-9_\\-]{0,63}", placeholder: "none", maxlength: 64 });
  const form = (fields, button, cls, run) => h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); run(); } }, fields, h("button", { type: "submit", class: cls }, button));
  const field = (label, input) => h("label", { class: "field grow" }, h("span", null, label), input);

  replace(root, h("div", { class: "title-row" }, h("h1", null, "Control"), now),
    card("Token", {}, h("div", { class: "ask" }, field("Control token: kept while this page is open, sent only with what you ask for here", secret))),
    h("div", { class: "three-up" },
      card("Savepoint", {}, h("p", { class: "soft" }, "The newest epoch, whole, in a folder of its own. The job goes on meanwhile."),
        form(field("Name", name), "Take a savepoint", "primary", () => change("savepoint", { name: name.value.trim() || null }, "Take a savepoint", "It is written beside the checkpoint.", "Take it",
          (found) => `Savepoint of epoch ${count(found.epoch)}: ${count(found.rows)} rows, ${bytes(found.bytes)}, ${found.url}`))),
      card("Rescale", {}, h("p", { class: "soft" }, "From the next epoch on, so many subtasks. No state is rewritten."),
        form(field("Subtasks", many), "Rescale", "primary", () => change("rescale", { parallelism: Number(many.value) }, `Rescale to ${count(Number(many.value))}`, "It takes effect with the next epoch.", "Rescale",
          (found) => `Rescaling to ${count(found.parallelism)} subtasks with the next epoch`))),
      card("Stop", {}, h("p", { class: "soft" }, "After the epoch under way. Nothing is lost; this server ends with the job."),
        form(field("Savepoint, by name", last), "Stop the job", "danger", () => change("stop", { savepoint: last.value.trim() || null }, "Stop the job", "It ends after the epoch under way. To go on, the program must be started again.", "Stop it",
          (found) => `Stopping${found.savepoint ? `, with a savepoint at ${found.savepoint}` : ""}`)))),
    card("What came of it", {}, log), ask);

  const update = () => { now.textContent = `${live.job.status}, ${count(live.job.parallelism)} subtasks`; };
  tell();
  update();
  return { update };
}
