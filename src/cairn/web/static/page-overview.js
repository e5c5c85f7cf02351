// The overview of the job.

import { get } from "./api.js";
import { bars, spark } from "./chart.js";
import { bytes, card, count, decimal, empty, facts, h, millis, plural, replace, span, table, when } from "./dom.js";
import { driversCard } from "./drivers.js";
import { picture } from "./graph.js";
import { PARTS } from "./page-epochs.js";

const SPARKS = 60;
const KEYS = "Keys with state, counted once per operator. An entry is a stored row: one per key of a state, one per entry of a map.";
const EVENTS_SHOWN = 5;

export function overview(root, live) {
  const tiles = h("div", { class: "tiles" });
  const failed = h("div", { class: "slot" });
  const drivers = h("div", { class: "slot" });
  const graph = h("div", { class: "slot" });
  const operators = h("div", { class: "slot" });
  const events = h("div", { class: "slot" });
  const timeline = bars({ title: "The last epochs", parts: PARTS, href: (each) => `#/epochs/${each.epoch}`, format: millis, height: 170 });
  const where = h("code", { class: "where" });
  let figures = () => {};
  let shown = null;

  replace(root,
    h("h1", { class: "unseen" }, "Overview"),
    failed,
    tiles,
    drivers,
    card("Graph", { aside: where, cls: "flush" }, graph),
    h("div", { class: "two wide-left" },
      card("Epochs", { aside: h("a", { href: "#/epochs" }, "all") }, timeline),
      h("div", { class: "stack" },
        card("Operators", { cls: "flush" }, operators),
        card("Events", { aside: h("a", { href: "#/history" }, "history") }, events))));

  function draw() {
    const { job, newest } = live;
    const epochs = live.epochs;
    where.textContent = job?.checkpoint ?? "";
    replace(failed, failureCard(live));
    replace(tiles, tileRow(live, epochs));
    replace(drivers, driversCard(live));
    figures(newest, live.health?.rates.operators);
    timeline.show(epochs);
    replace(operators, newest ? operatorTable(newest) : empty("No epoch is committed yet."));
  }

  get("/api/graph").then((found) => {
    const [drawn, update] = picture(found);
    figures = update;
    replace(graph, drawn);
    figures(live.newest, live.health?.rates.operators);
  }, (error) => replace(graph, empty(error.message)));
  function update() {
    draw();
    const now = `${live.job?.status}/${live.lead?.restarts}/${live.job?.leader?.term}/${live.job?.error}`;
    if (now !== shown) recent(events);
    shown = now;
  }
  function tick() {
    if (!live.newest) return;
    tiles.querySelector(".tile-age").textContent = `${span(live.nowMs - live.newest.wall_ms)} ago`;
    if (live.lagMs !== null) tiles.querySelector(".tile-lag").textContent = span(live.lagMs);
  }
  update();
  return { update, tick };
}

// The last starts, rollbacks, savepoints and failures, together.
async function recent(events) {
  try {
    const [points, failed] = await Promise.all([get("/api/points"), get("/api/failures")]);
    const found = [
      ...points.records.map((each) => [each.wall_ms, each.kind === "restore" ? `rolled back to epoch ${count(each.epoch)}` : `started on ${each.host}`, "#/history"]),
      ...points.savepoints.map((each) => [each.created_ms, `savepoint of epoch ${count(each.epoch)}, ${bytes(each.bytes)}`, "#/history"]),
      ...failed.restarts.map((each) => [each.wall_ms, `restart ${count(each.number)} after ${span(each.pause_ms)}: ${each.cause}`, "#/errors"]),
      ...failed.failures.map((each) => [each.wall_ms, `epoch ${count(each.epoch)} failed: ${each.message.split("\n")[0]}`, "#/errors"]),
    ].sort((a, b) => b[0] - a[0]).slice(0, EVENTS_SHOWN);
    replace(events, found.length ? h("ul", { class: "events" }, found.map(([ms, text, href]) => h("li", null, when(ms, { dated: false }), h("a", { href, title: text }, text)))) : empty("None are kept."));
  } catch (error) {
    replace(events, empty(error.message));
  }
}

function tileRow(live, epochs) {
  const { newest, job, health, lagMs: lag } = live;
  if (!newest) return [tile("Epoch", "–", "none is committed yet")];
  const last = epochs.slice(-SPARKS);
  const entries = newest.state_entries === 1 ? "1 entry" : `${count(newest.state_entries)} entries`;
  const aside = newest.late_rows + newest.untimed_rows + newest.error_rows;
  return [
    tile("Epoch", count(newest.epoch), h("span", { class: "tile-age" }, `${span(live.nowMs - newest.wall_ms)} ago`)),
    tile("Rows per second", decimal(health.rates.rows_per_s >= 100 ? Math.round(health.rates.rows_per_s) : health.rates.rows_per_s), intoOperators(newest, health), spark(last.map((each) => each.rows_in), "c-rows"), "In the last seconds; the line shows the rows of each epoch"),
    tile("Epoch time", millis(newest.epoch_ms), `process ${millis(newest.parts.process)}`, spark(last.map((each) => each.epoch_ms), "c-time")),
    tile("State", newest.state_keys === null ? entries : plural(newest.state_keys, "key"), newest.state_keys === null ? bytes(newest.state_bytes) : `${entries}, ${bytes(newest.state_bytes)}`, spark(last.map((each) => each.state_entries), "c-keys"), KEYS),
    tile("Event-time lag", lag === null ? "–" : h("span", { class: "tile-lag" }, span(lag)), lag === null ? "no watermark" : "now − watermark", spark(last.map((each) => (each.watermark_ms === null ? null : each.wall_ms - each.watermark_ms)), "c-lag")),
    tile("Subtasks", count(job.parallelism), aside ? `${plural(aside, "row")} put aside` : "no rows put aside"),
  ];
}

// A row counts once for each operator that gets it.
function intoOperators(newest, health) {
  const many = Object.keys(newest.operators).length;
  return `into ${plural(many, "operator")}, last ${span(health.rates.window_ms)}`;
}

// If the job fails, its page starts with the cause.
function failureCard(live) {
  const { failure, status, why, restart } = live.health ?? {};
  const titles = { failed: "The job has failed", failing: "The job is failing: the epoch is being retried", restarting: "The run has failed, and begins again" };
  const title = titles[status];
  if (!title) return null;
  const cls = `now-failed is-${status}`;
  if (!failure) return card(title, { cls }, h("p", { class: "cause" }, why ?? live.job.error ?? "The cause is not recorded."), facts([["next", "start the job again: it continues after its newest epoch"]]));
  const often = `${plural(failure.attempts, "attempt")} at epoch ${count(failure.epoch)}${failure.times > 1 ? `, seen ${failure.times} times` : ""}`;
  return card(title, { cls, aside: h("a", { href: "#/errors" }, "traceback") },
    h("p", { class: "cause" }, failure.cause),
    facts([
      failure.operator ? ["operator", h("a", { href: `#/operators/${encodeURIComponent(failure.operator)}` }, failure.operator)] : null,
      failure.key ? ["key", h("code", { class: "wrap" }, failure.key)] : null,
      failure.row ? ["row", h("code", { class: "wrap" }, failure.row)] : null,
      failure.timer ? ["timer", h("code", { class: "wrap" }, failure.timer)] : null,
      failure.at ? ["at", h("code", { class: "wrap" }, failure.at)] : null,
      failure.log ? ["log", h("code", { class: "wrap" }, failure.log)] : null,
      ["when", when(failure.wall_ms), `, ${often}`],
      restart ? ["restart", `${count(restart.number)}, after a pause of ${span(restart.pause_ms)}: `, when(restart.wall_ms + restart.pause_ms, { dated: false })] : null,
      ["next", failure.next],
    ]));
}

function tile(name, value, about, line = null, note = null) {
  return h("div", { class: "tile", title: note }, h("span", { class: "tile-name" }, name), h("span", { class: "tile-value" }, value), h("span", { class: "tile-about" }, about), line);
}

export function operatorTable(newest) {
  const rows = Object.entries(newest.operators).map(([uid, found]) => ({ uid, ...found }));
  if (!rows.length) return empty("This epoch processed no rows: it comes from a savepoint or a branch.");
  return table([
    { name: "Operator", cell: (row) => h("a", { href: `#/operators/${encodeURIComponent(row.uid)}` }, row.uid) },
    { name: "Rows in", align: "right", cell: (row) => count(row.rows_in) },
    { name: "Rows out", align: "right", cell: (row) => count(row.rows_out) },
    { name: "Keys", align: "right", cell: (row) => count(row.state_keys) },
    { name: "Entries", align: "right", cell: (row) => count(row.state_entries) },
    { name: "Changed", align: "right", cell: (row) => count(row.entries_changed) },
    { name: "Delta", align: "right", cell: (row) => bytes(row.delta_bytes) },
  ], rows, { caption: "Operators in the newest epoch" });
}
