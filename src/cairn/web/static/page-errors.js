// Failures, and rows that were put aside.

import { get } from "./api.js";
import { card, count, empty, facts, h, plural, replace, span, table, when } from "./dom.js";

export function errors(root, live) {
  const failures = h("div", { class: "slot" });
  const aside = h("div", { class: "slot" });
  const restarts = h("div", { class: "slot" });
  const logs = h("div", { class: "slot" });
  replace(root, h("h1", null, "Errors"), card("Failures", {}, failures), restarts, card("Rows put aside", { cls: "flush" }, aside), logs);
  let shown = null;

  async function load() {
    replace(logs, logTable(live.job?.slots ?? []));
    const wanted = `${live.newest?.epoch}/${live.job?.status}/${live.job?.error}/${live.lead?.restarts}`;
    if (shown === wanted) return;
    shown = wanted;
    try {
      const found = await get("/api/failures");
      // Keep the open ones open.
      const open = new Set([...failures.querySelectorAll("details[open]")].map((each) => each.dataset.at));
      replace(failures, found.failures.length ? found.failures.map((each) => failure(each, open)) : empty("No failures are recorded."));
      replace(restarts, found.restarts.length ? restartCard(found.restarts) : null);
      replace(aside, found.put_aside.length ? [asideTable(found.put_aside), samples(found.put_aside)] : empty("No rows were put aside in the last epochs."));
    } catch (error) {
      replace(failures, empty(error.message));
    }
  }
  load();
  return { update: load };
}

function failure(each, open) {
  const first = (each.message ?? "").split("\n")[0];
  return h("details", { class: "failure", "data-at": each.wall_ms, open: open.has(String(each.wall_ms)) },
    h("summary", null,
      h("span", { class: "failure-head" },
        h("span", { class: `chip ${each.ended_run ? "is-failed" : "is-paused"}` }, each.ended_run ? "ended the run" : "tried again"),
        h("span", { class: "soft" }, when(each.wall_ms), `, epoch ${count(each.epoch)}, ${plural(each.attempts, "attempt")}`)),
      h("span", { class: "failure-what" }, first)),
    facts([
      ["error", each.kind],
      each.operator ? ["operator", h("a", { href: `#/operators/${encodeURIComponent(each.operator)}` }, each.operator)] : null,
      each.key ? ["key", h("code", { class: "wrap" }, each.key)] : null,
      each.row ? ["row", h("code", { class: "wrap" }, each.row)] : null,
      each.timer ? ["timer", h("code", { class: "wrap" }, each.timer)] : null,
    ]),
    h("h3", null, "Message"), h("pre", null, each.message),
    each.traceback ? [h("h3", null, "Traceback"), h("pre", null, each.traceback)] : null);
}

// Runs that failed and began again, of all drivers of the job.
function restartCard(rows) {
  return card("Restarts", { cls: "flush" }, table([
    { name: "Failed", cell: (row) => when(row.wall_ms) },
    { name: "Restart", align: "right", cell: (row) => count(row.number) },
    { name: "Pause", align: "right", cell: (row) => span(row.pause_ms) },
    { name: "Error", cell: (row) => row.kind },
    { name: "Cause", cls: "text", cell: (row) => row.cause },
    { name: "Driver", cell: (row) => `${row.host}, pid ${row.pid}` },
  ], rows, { caption: "Restarts, newest first" }));
}

function asideTable(rows) {
  return table([
    { name: "Epoch", cell: (row) => h("a", { href: `#/epochs/${row.epoch}` }, count(row.epoch)) },
    { name: "Committed", cell: (row) => when(row.wall_ms) },
    { name: "Operator", cell: (row) => row.operator },
    { name: "Failed", align: "right", cell: (row) => count(row.error_rows) },
    { name: "Late", align: "right", cell: (row) => count(row.late_rows) },
    { name: "Without a time", align: "right", cell: (row) => count(row.untimed_rows) },
  ], rows, { caption: "Rows put aside, by epoch and operator" });
}

// The log files of slots, on the machine of the executor: output and logs of functions.
function logTable(slots) {
  if (!slots.length) return null;
  return card("Logs of the slots", { cls: "flush" }, table([
    { name: "Subtask", cell: (row) => count(row.subtask) },
    { name: "Executor", cell: (row) => row.executor },
    { name: "Log file", cell: (row) => h("code", { class: "wrap" }, row.log) },
  ], slots, { caption: "Logs of the slots" }));
}

const SAMPLES_SHOWN = 10;

// Some of the rows that functions failed on, with the error.
function samples(rows) {
  const found = rows.flatMap((row) => row.sample.map((each) => ({ ...each, epoch: row.epoch, operator: row.operator })));
  if (!found.length) return null;
  return h("div", null, h("h3", { class: "sample-title" }, "Some of the rows that failed, newest first"),
    h("ul", { class: "sample" }, found.slice(0, SAMPLES_SHOWN).map((each) => h("li", null,
      h("b", null, each.error),
      h("span", { class: "soft" }, h("a", { href: `#/operators/${encodeURIComponent(each.operator)}` }, each.operator), `, epoch ${count(each.epoch)}`, each.key === null ? "" : `, key ${each.key}`, each.at ? `, at ${each.at}` : ""),
      h("code", { class: "wrap" }, each.row)))));
}
