// One operator: its function, states and figures.

import { get } from "./api.js";
import { bytes, card, count, decimal, empty, facts, h, replace, table } from "./dom.js";
import { operatorCharts } from "./page-charts.js";

export function operator(root, live, { inner: uid }) {
  const about = h("div", { class: "slot" });
  const states = h("div", { class: "slot" });
  const ranges = h("div", { class: "slot" });
  const metrics = card("Metrics of the function", {}, h("div", { class: "slot" }));
  metrics.hidden = true;
  const figures = operatorCharts(uid);
  replace(root,
    h("div", { class: "title-row" }, h("h1", null, "Operator ", h("code", null, uid)),
      h("nav", { class: "steps", "aria-label": "More about this operator" },
        h("a", { class: "button", href: `#/groups?operator=${encodeURIComponent(uid)}` }, "Key groups"),
        h("a", { class: "button", href: `#/state?operator=${encodeURIComponent(uid)}` }, "State"))),
    figures,
    h("div", { class: "two" }, card("Operator", {}, about), card("States", { cls: "flush" }, states)),
    metrics,
    card("Ranges of key groups", { cls: "flush" }, ranges));

  let known = null;
  let shown = null;
  get("/api/graph").then((found) => {
    known = found.graph?.operators.find((each) => each.uid === uid) ?? null;
    draw();
  }, (error) => replace(about, empty(error.message)));

  async function load() {
    const newest = live.newest?.epoch ?? null;
    if (newest === null || newest === shown) return;
    shown = newest;
    try {
      const entries = (await get(`/api/epochs/${newest}`)).operators;
      const found = entries[uid];
      // Broadcast state is an entry of its own.
      const shared = Object.entries(entries).filter(([name, each]) => each.operator === uid && name !== uid);
      if (!found) return void replace(ranges, empty("The newest epoch does not have this operator."));
      const own = userMetrics(found.user ?? {});
      metrics.hidden = own.length === 0;
      if (own.length) replace(metrics.lastElementChild, facts(own));
      replace(states, stateTable(uid, found, shared.map(([, each]) => each)));
      replace(ranges, rangeTable([...found.ranges, ...shared.flatMap(([, each]) => each.ranges.map((part) => ({ ...part, subtask: null })))]));
    } catch (error) {
      replace(ranges, empty(error.message));
    }
  }

  function draw() {
    figures.show(live.epochs.slice(-300));
    const last = live.newest?.operators[uid];
    replace(about, facts([
      known ? ["function", h("code", null, known.function), ` (${known.kind})`] : null,
      known ? ["level", count(known.level), known.chained ? ", chained" : ""] : null,
      known ? ["key", Object.entries(known.keys).map(([name, type]) => `${name} ${type}`).join(", ") || "none"] : null,
      known ? ["timers", known.timers ? "yes" : "no"] : null,
      known ? ["output", h("code", { class: "wrap" }, known.schema)] : null,
      last ? ["rows in", `${count(last.rows_in)} in the newest epoch, ${count(last.rows_out)} out`] : null,
      last ? ["put aside", `${count(last.late_rows)} late, ${count(last.untimed_rows)} without a time, ${count(last.error_rows)} failed`] : null,
    ]));
    load();
  }
  draw();
  return { update: draw };
}

// Counters, gauges and histograms of the function.
function userMetrics({ counters = {}, gauges = {}, histograms = {} }) {
  return [
    ...[...Object.entries(counters), ...Object.entries(gauges)].map(([name, value]) => [name, decimal(value)]),
    ...Object.entries(histograms).map(([name, each]) => [name, `${count(each.count)} values, mean ${decimal(each.count ? each.sum / each.count : null)}`]),
  ];
}

function stateTable(uid, found, shared) {
  const rows = [found, ...shared].flatMap((each) => Object.entries(each.states).map(([name, decl]) => ({ name, ...decl, key: each.scope === "shared" ? each.key_types.key : null })));
  if (!rows.length) return empty("This operator has no state.");
  return table([
    { name: "State", cell: (row) => h("a", { href: `#/state?operator=${encodeURIComponent(uid)}&state=${encodeURIComponent(row.name)}` }, row.name) },
    { name: "Kind", cell: (row) => row.kind.replace("_", " ") },
    { name: "Type", cell: (row) => h("code", { class: "wrap" }, row.key ?? row.entry_type ? `${row.key ?? row.entry_type} → ${row.type}` : row.type) },
    { name: "Expires", cell: (row) => row.ttl ?? "" },
  ], rows, { caption: "States" });
}

function rangeTable(rows) {
  return table([
    { name: "Subtask", cell: (row) => (row.subtask === null ? "all, alike" : count(row.subtask)) },
    { name: "Key groups", cell: (row) => `${row.first_group}–${row.first_group + row.group_count - 1}` },
    { name: "Keys", align: "right", cell: (row) => count(row.state_keys) },
    { name: "Entries", align: "right", cell: (row) => count(row.state_entries) },
    { name: "State", align: "right", cell: (row) => bytes(row.state_bytes) },
    { name: "Bases", align: "right", cell: (row) => count(row.bases) },
    { name: "Deltas", align: "right", cell: (row) => count(row.deltas) },
    { name: "In files", align: "right", cell: (row) => bytes(row.file_bytes) },
  ], rows, { caption: "Ranges of key groups" });
}
