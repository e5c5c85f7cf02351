// Rescales, savepoints, branches, starts and rollbacks.

import { get } from "./api.js";
import { bytes, card, count, empty, facts, h, replace, table, when } from "./dom.js";

export function history(root, live) {
  const body = h("div", { class: "stack" });
  replace(root, h("h1", null, "History"), body);
  let shown = null;

  async function load() {
    const wanted = `${live.newest?.epoch}/${live.job?.status}`;
    if (shown === wanted) return;
    shown = wanted;
    try {
      const found = await get("/api/points");
      replace(body, ...sections(found, live));
    } catch (error) {
      replace(body, card("History", {}, empty(error.message)));
    }
  }
  load();
  return { update: load };
}

function rescales(live) {
  const { scaling } = live.job;
  const known = new Map();
  for (const each of live.epochs ?? []) if (each.decision) known.set(each.decision.wall_ms, each.decision);
  for (const each of scaling?.changes ?? []) known.set(each.wall_ms, each);
  const rows = [...known.values()].sort((a, b) => b.wall_ms - a.wall_ms);
  if (!rows.length && (!scaling || scaling.mode === "off")) return [];
  const last = scaling?.decision;
  return [card("Rescales", { cls: "flush", aside: last ? `${last.kind === "hold" ? "stays" : last.kind}: ${last.reason}` : null }, rows.length ? table([
    { name: "When", cell: (row) => when(row.wall_ms) },
    { name: "Subtasks", cell: (row) => `${count(row.parallelism)} → ${count(row.target)}${row.is_applied === false ? " (observed only)" : ""}` },
    { name: "By", cell: (row) => row.by ?? "autoscale" },
    { name: "Why", cell: (row) => row.reason },
  ], rows, { caption: "Rescales" }) : empty("None yet."))];
}

function sections(found, live) {
  const { job } = live.job;
  return [
    ...rescales(live),
    h("div", { class: "two" },
      card("Savepoints", { cls: "flush" }, found.savepoints.length ? table([
        { name: "Taken", cell: (row) => when(row.created_ms) },
        { name: "Epoch", align: "right", cell: (row) => count(row.epoch) },
        { name: "Size", align: "right", cell: (row) => bytes(row.bytes) },
        { name: "Where", cell: (row) => h("code", { class: "wrap" }, row.url) },
      ], found.savepoints, { caption: "Savepoints" }) : empty("None yet. ", h("code", null, "cairn savepoint"), " and ", h("code", null, "run.savepoint()"), " take one.")),
      card("Branches", { cls: "flush" }, found.branches.length ? table([
        { name: "Branch", cell: (row) => h("code", { class: "wrap" }, row.url) },
        { name: "Shared objects", align: "right", cell: (row) => count(row.objects) },
      ], found.branches, { caption: "Branches" }) : empty("None. ", h("code", null, "cairn branch"), " makes one: it shares files and copies nothing."))),
    h("div", { class: "two" },
      card("Starts and rollbacks", { cls: "flush" }, found.records.length ? table([
        { name: "When", cell: (row) => when(row.wall_ms) },
        { name: "What", cell: (row) => (row.kind === "restore" ? h("b", null, `rolled back to epoch ${count(row.epoch)}`) : `started on ${row.host}, pid ${row.pid}`) },
        { name: "Record", align: "right", cell: (row) => count(row.number) },
      ], found.records, { caption: "Starts and rollbacks" }) : empty("None are kept.")),
      card("The checkpoint", {}, facts([
        ["where", h("code", { class: "wrap" }, live.job.checkpoint)],
        job ? ["created", when(job.created_ms)] : null,
        job ? ["key groups", count(job.max_parallelism)] : null,
        job ? ["job id", h("code", null, job.job_id)] : null,
        ["comes from", found.origin ? [`${found.origin.kind} of epoch ${count(found.origin.epoch)}, `, h("code", { class: "wrap" }, found.origin.url)] : "nothing: it started empty"],
        ["rolled back", found.rolled_back.length ? `epochs ${found.rolled_back.map((each) => each.epoch).join(", ")}` : "none of the kept epochs"],
      ]))),
  ];
}
