// The distribution of keys and rows over key groups and subtasks.

import { get } from "./api.js";
import { heat, shares } from "./chart.js";
import { bytes, card, choice, count, decimal, empty, h, replace, table } from "./dom.js";

const COLUMNS = 32;

export function groups(root, live, { query }) {
  let operator = query.get("operator");
  let measure = "stored";
  let found = null;
  let asked = null;
  const picks = h("div", { class: "picks" });
  const body = h("div", { class: "stack" });
  replace(root, h("div", { class: "title-row" }, h("h1", null, "Key groups"), picks), body);

  async function load() {
    const newest = live.newest?.epoch ?? null;
    const wanted = `${operator}/${newest}`;
    if (asked === wanted) return;
    asked = wanted;
    try {
      found = await get(`/api/groups${operator ? `?operator=${encodeURIComponent(operator)}` : ""}`);
      draw();
    } catch (error) {
      replace(body, card("Key groups", {}, empty(error.message)));
    }
  }

  function draw() {
    if (!found.groups) return void replace(body, card("Key groups", {}, empty("The newest epoch has no keyed operator.")));
    const hasRows = Array.isArray(found.groups.rows);
    if (!hasRows) measure = "stored";
    replace(picks,
      choice("Operator", found.operators.map((each) => [each, each]), found.operator, (value) => {
        operator = value;
        load();
      }),
      choice("Show", [["stored", "stored rows"], ...(hasRows ? [["rows", "incoming rows"]] : [])], measure, (value) => {
        measure = value;
        draw();
      }));
    replace(body, map(found, measure), h("div", { class: "two" }, subtasks(found), hot(found)));
  }
  load();
  return { update: load };
}

function map(found, measure) {
  const values = measure === "rows" ? found.groups.rows : found.groups.stored_rows;
  const step = Math.ceil(found.groups.count / values.length);
  const total = values.reduce((sum, each) => sum + each, 0);
  const mean = total / values.length;
  const top = Math.max(...values);
  const readout = h("p", { class: "readout", "aria-live": "polite" }, `fullest: ${count(top)} rows, ${decimal(mean ? top / mean : 0)} × the mean`);
  const cells = values.map((value, index) => {
    const first = index * step;
    const last = Math.min(found.groups.count, first + step) - 1;
    const owner = found.subtasks.find((each) => first >= each.first_group && first < each.first_group + each.group_count);
    return {
      value, first, starts: owner?.first_group === first,
      text: `key group${step > 1 ? `s ${first}–${last}` : ` ${first}`}, subtask ${owner?.subtask ?? "?"}: ${count(value)} rows, ${decimal(mean ? value / mean : 0)} × the mean`,
    };
  });
  const grid = heat({ cells, columns: COLUMNS, label: "Rows per key group", onread: (text) => { readout.textContent = text; } });
  const scale = h("div", { class: "scale", "aria-hidden": "true" }, "0", Array.from({ length: 10 }, (_, at) => h("i", { class: `heat-${at}` })), count(top));
  const how = measure === "rows" ? "incoming rows of the newest epoch" : found.groups.is_exact ? "rows in files, from their indexes; a key that changed is in several files" : "rows in files; files without an index by key group count as evenly distributed";
  return card(`${found.operator}: ${found.groups.count} key groups`, { aside: scale }, grid, h("div", { class: "under" }, readout, h("span", { class: "soft" }, how)));
}

function subtasks(found) {
  const { skew } = found;
  const rows = found.subtasks;
  const skews = [`entries ${decimal(skew.state_entries)}`, skew.rows === null ? null : `rows ${decimal(skew.rows)}`].filter(Boolean).join(", ");
  return card("Subtasks", { aside: h("span", { class: "soft", title: "The largest share divided by the mean: 1 is even" }, `skew ${skews}`) },
    shares(rows.map((each) => ({ name: `subtask ${each.subtask}`, value: each.state_entries })), (value) => `${count(value)} entries`),
    table([
      { name: "Subtask", cell: (row) => count(row.subtask) },
      { name: "Key groups", cell: (row) => `${row.first_group}–${row.first_group + row.group_count - 1}` },
      { name: "Keys", align: "right", cell: (row) => count(row.state_keys) },
      { name: "Entries", align: "right", cell: (row) => count(row.state_entries) },
      { name: "State", align: "right", cell: (row) => bytes(row.state_bytes) },
      { name: "Rows in", align: "right", cell: (row) => count(row.rows) },
    ], rows, { caption: "Subtasks" }));
}

function hot(found) {
  if (!found.hot_keys.length) return card("Hot keys", {}, empty("None in the newest epoch."));
  return card("Hot keys", { aside: h("span", { class: "soft" }, "of the newest epoch, estimated") },
    shares(found.hot_keys.map((each) => ({ name: h("code", null, each.key), value: each.rows, mean: false })), (value) => `${count(value)} rows`));
}
