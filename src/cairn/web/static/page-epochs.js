// The timeline of epochs, and the details of one.

import { get } from "./api.js";
import { bars } from "./chart.js";
import { bytes, card, count, empty, facts, h, millis, plural, replace, table, when } from "./dom.js";

// With the names of the server, in the order of the stack.
export const PARTS = [
  ["process", "processing", "Processing rows: the slowest subtask"],
  ["alignment", "alignment", "Waiting until all input has arrived"],
  ["snapshot", "snapshot", "Writing the changes"],
  ["commit", "commit", "Publishing by sinks, after the epoch is in the log"],
  ["begin", "begin", "Loading the state, with restores"],
  ["other", "Spark", "Planning, scheduling, shuffling"],
];
const ROWS_SHOWN = 40;
const SCOPES = { shared: "its broadcast state", feedback: "records of a loop" };

export function epochs(root, live) {
  const timeline = bars({ title: "Epochs", parts: PARTS, href: (each) => `#/epochs/${each.epoch}`, format: millis, height: 240 });
  const list = h("div", { class: "slot" });
  let rows = ROWS_SHOWN;
  replace(root, h("h1", null, "Epochs"), card("Timeline", {}, timeline), card("Newest first", { cls: "flush" }, list));

  function draw() {
    const found = live.epochs;
    timeline.show(found);
    if (!found.length) return void replace(list, empty("No epoch is committed yet."));
    const more = found.length > rows ? h("p", { class: "more" }, h("button", { type: "button", onclick: () => { rows += 200; draw(); } }, `Show more of ${count(found.length)}`)) : null;
    replace(list, epochTable(found.toReversed().slice(0, rows)), more);
  }
  draw();
  return { update: draw };
}

export function mishaps(each) {
  const attempts = each.timings.attempts ?? 1;
  const notes = [];
  if (attempts > 1) notes.push(`${attempts} attempts`);
  if (each.restored) notes.push(`${each.restored} restored`);
  const aside = each.late_rows + each.untimed_rows + each.error_rows;
  if (aside) notes.push(`${plural(aside, "row")} put aside`);
  return notes.join(", ");
}

function epochTable(rows) {
  return table([
    { name: "Epoch", cell: (row) => h("a", { href: `#/epochs/${row.epoch}` }, count(row.epoch)) },
    { name: "Committed", cell: (row) => when(row.wall_ms) },
    { name: "Rows", align: "right", cell: (row) => count(row.rows_in) },
    { name: "Rows/s", align: "right", cell: (row) => count(row.rows_per_s) },
    { name: "Time", align: "right", cell: (row) => millis(row.epoch_ms) },
    ...PARTS.map(([id, name]) => ({ name, align: "right", cls: "soft", cell: (row) => (id === "commit" && row.commit_ms === null ? "–" : millis(row.parts[id])) })),
    { name: "Keys", align: "right", cell: (row) => count(row.state_keys) },
    { name: "Entries", align: "right", cell: (row) => count(row.state_entries) },
    { name: "Delta", align: "right", cell: (row) => bytes(row.delta_bytes) },
    { name: "Note", cell: mishaps },
  ], rows, { caption: "Epochs, newest first" });
}

export function epoch(root, live, { inner }) {
  const number = Number(inner);
  const timeline = bars({ title: "Epochs", parts: PARTS, href: (each) => `#/epochs/${each.epoch}`, format: millis, height: 120 });
  const body = h("div", { class: "stack" });
  const step = h("nav", { class: "steps", "aria-label": "Other epochs" });
  replace(root, h("div", { class: "title-row" }, h("h1", null, `Epoch ${count(number)}`), step), card("Timeline", {}, timeline), body);

  function draw() {
    const found = live.epochs;
    timeline.show(found, number);
    const at = found.findIndex((each) => each.epoch === number);
    replace(step, [["←", found[at - 1]], ["→", at < 0 ? null : found[at + 1]]].map(([arrow, each]) =>
      each ? h("a", { class: "button", href: `#/epochs/${each.epoch}` }, arrow === "←" ? `← ${count(each.epoch)}` : `${count(each.epoch)} →`) : null));
  }
  draw();
  get(`/api/epochs/${encodeURIComponent(inner)}`).then((found) => replace(body, ...details(found)), (error) => replace(body, card("Not kept", {}, empty(`${error.message}. The timeline has the figures of epochs that are retired.`))));
  return { update: draw };
}

function details(found) {
  return [
    h("div", { class: "two" },
      card("Summary", {}, facts([
        ["committed", when(found.wall_ms)],
        ["parent", found.parent === null ? "none" : count(found.parent), `, term ${found.term}`],
        ["lineage", found.retired ? "retired" : found.on_lineage ? (found.newest === found.epoch ? "the newest" : "current") : "rolled back"],
        ["rows", `${count(found.rows_in)} in, ${count(found.rows_out)} out`],
        ["put aside", `${count(found.late_rows)} late, ${count(found.untimed_rows)} without a time, ${count(found.error_rows)} failed`],
        ["attempts", `${count(found.attempts)}, ${plural(found.restored, "slot")} restored`],
        ["watermark", found.watermark_ms === null ? "none yet" : when(found.watermark_ms)],
        ["Spark", `batch ${found.spark.batch_id} of ${found.spark.folder}`],
      ])),
      card("Time", {}, facts([
        ["until committed", millis(found.epoch_ms)],
        ...PARTS.map(([id, name, note]) => [name, h("span", { class: "with-bar", title: note }, h("i", { class: `swatch block p-${id}` }), id === "commit" && found.commit_ms === null ? "unknown" : millis(found.parts[id]))]),
      ]))),
    card("Operators", { cls: "flush" }, table([
      { name: "Operator", cell: (row) => [h("a", { href: `#/operators/${encodeURIComponent(row.operator)}` }, row.operator), SCOPES[row.scope] ? ` (${SCOPES[row.scope]})` : ""] },
      { name: "Rows in", align: "right", cell: (row) => count(row.rows_in) },
      { name: "Rows out", align: "right", cell: (row) => count(row.rows_out) },
      { name: "Late", align: "right", cell: (row) => count(row.late_rows) },
      { name: "Failed", align: "right", cell: (row) => count(row.error_rows) },
      { name: "Keys", align: "right", cell: (row) => count(row.state_keys) },
      { name: "Entries", align: "right", cell: (row) => count(row.state_entries) },
      { name: "State", align: "right", cell: (row) => bytes(row.ranges.reduce((sum, part) => sum + part.state_bytes, 0)) },
      { name: "Bases", align: "right", cell: (row) => count(row.ranges.reduce((sum, part) => sum + part.bases, 0)) },
      { name: "Deltas", align: "right", cell: (row) => count(row.ranges.reduce((sum, part) => sum + part.deltas, 0)) },
      { name: "Alignment", align: "right", cell: (row) => millis(row.alignment_ms) },
    ], Object.entries(found.operators).map(([uid, row]) => ({ uid, ...row })), { caption: "Operators" })),
    h("div", { class: "two" },
      card("Subtasks", { cls: "flush" }, found.subtasks.length ? table([
        { name: "Level", cell: (row) => count(row.level) },
        { name: "Subtask", cell: (row) => count(row.subtask) },
        { name: "Begin", align: "right", cell: (row) => millis(row.begin_ms) },
        { name: "Process", align: "right", cell: (row) => millis(row.process_ms) },
        { name: "Snapshot", align: "right", cell: (row) => millis(row.snapshot_ms) },
        { name: "Restored", cell: (row) => (row.restored ? "yes" : "") },
      ], found.subtasks, { caption: "Times of subtasks" }) : empty("None were reported.")),
      card("Sources", { cls: "flush" }, found.sources.length ? table([
        { name: "Source", cell: (row) => row.name },
        { name: "Read up to", cell: (row) => h("code", { class: "wrap" }, typeof row.offset === "string" ? row.offset : JSON.stringify(row.offset)) },
      ], found.sources, { caption: "Offsets of sources" }) : empty("None."))),
  ];
}
