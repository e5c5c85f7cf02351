// The state browser: look up a key, page through, ask in SQL, compare two epochs.

import { get, post } from "./api.js";
import { card, choice, count, empty, h, plural, replace, table } from "./dom.js";

const PAGE_ROWS = 100;
const SQL_ROWS = 500;
const WAYS = [["lookup", "Look up"], ["browse", "Browse"], ["sql", "SQL"], ["diff", "Diff"]];

export function states(root, live, { query }) {
  let listed = [];
  let chosen = { operator: query.get("operator"), state: query.get("state") };
  let way = query.get("way") ?? "lookup";
  const list = h("div", { class: "slot" });
  const tabs = h("div", { class: "ways", role: "tablist", "aria-label": "Ways to read the state" });
  const panel = h("div", { class: "panel", role: "tabpanel", id: "panel" });
  replace(root, h("h1", null, "State"), h("div", { class: "browser" }, card("States", { cls: "flush side" }, list), h("section", { class: "card" }, tabs, panel)));

  const current = () => listed.find((each) => each.operator === chosen.operator && each.state === chosen.state) ?? listed.find((each) => each.operator === chosen.operator) ?? listed[0];

  function pick(each) {
    chosen = { operator: each.operator, state: each.state };
    draw();
  }

  function draw() {
    const state = current();
    if (!state) return void replace(list, empty("This job keeps no state yet."));
    replace(list, h("ul", { class: "picker" }, listed.map((each) => h("li", null,
      h("button", { type: "button", class: "pick", "aria-pressed": String(each === state), onclick: () => pick(each) },
        h("span", { class: "pick-name" }, h("span", { class: "soft" }, `${each.operator}.`), each.state),
        h("span", { class: "pick-about" }, each.kind, each.keys.length ? ` by ${each.keys.join(", ")}` : ""))))));
    replace(tabs, WAYS.map(([id, name]) => h("button", { type: "button", role: "tab", class: "way", "aria-selected": String(id === way), "aria-controls": "panel", onclick: () => { way = id; draw(); } }, name)));
    replace(panel, { lookup, browse, sql, diff }[way](state, live));
  }

  get("/api/state").then((found) => {
    listed = found.states;
    draw();
  }, (error) => replace(list, empty(error.message)));
  return {};
}

// A form, and the newest answer below it.
function asking(fields, button, ask) {
  const out = h("div", { class: "answer", "aria-live": "polite" });
  let turn = 0;
  const run = async () => {
    const mine = (turn += 1);
    out.setAttribute("aria-busy", "true");
    try {
      const found = await ask();
      if (mine === turn) replace(out, found);
    } catch (error) {
      if (mine === turn) replace(out, h("p", { class: "failed", role: "alert" }, h("b", null, error.message), error.next ? ` Next: ${error.next}` : ""));
    } finally {
      out.removeAttribute("aria-busy");
    }
  };
  const form = h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); run(); } }, fields, h("button", { type: "submit", class: "primary" }, button));
  return { element: [form, out], run, form, out };
}

const at = (found) => h("p", { class: "stamp" }, `as of epoch ${count(found.epoch)}`, found.source === "slot" ? ", answered by the running job" : "");

export function shown(value) {
  if (value === null || value === undefined) return h("span", { class: "null" }, "null");
  if (typeof value === "object") return h("code", { class: "wrap" }, JSON.stringify(value));
  if (typeof value === "number") return count(value) === "NaN" || !Number.isInteger(value) ? String(value) : value.toLocaleString("en-US");
  return String(value);
}

const spelled = (value) => (typeof value === "string" ? value : JSON.stringify(value));

const isNumber = (type) => /^(tinyint|smallint|int|integer|bigint|long|short|byte|float|double|decimal)/i.test(type);

function rows(columns, found, read, caption) {
  if (!found.length) return empty("No rows.");
  return table(columns.map((each, index) => ({ name: each.name, note: each.type, head: false, align: isNumber(each.type) ? "right" : null, cell: (row) => shown(read(row, each, index)) })), found, { caption, cls: "data" });
}

// Strings and numbers: digits inside a string are not a number.
const TOKENS = /"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g;
// A number with more digits may lose some in a browser: it is sent as text.
const DIGITS_EXACT = 15;

// A key as typed by a person: one value, or a JSON array with a value per key column.
export function typedKey(text, types) {
  if (types.length > 1) {
    let parsed;
    try {
      parsed = JSON.parse(text.replace(TOKENS, (part) => (/^-?[\d.]+$/.test(part) && part.length > DIGITS_EXACT ? `"${part}"` : part)));
    } catch {
      parsed = null;
    }
    if (!Array.isArray(parsed)) throw new Error(`This key has ${types.length} columns: type a JSON array like ["a", 3].`);
    return parsed;
  }
  const type = types[0] ?? "string";
  const trimmed = text.trim();
  // A number that a browser cannot represent exactly is sent as text.
  if (isNumber(type) && /^-?\d+$/.test(trimmed) && Number.isSafeInteger(Number(trimmed))) return [Number(trimmed)];
  if (/^(float|double)/i.test(type) && trimmed !== "" && Number.isFinite(Number(trimmed))) return [Number(trimmed)];
  if (/^boolean/i.test(type) && /^(true|false)$/i.test(trimmed)) return [trimmed.toLowerCase() === "true"];
  return [/^(string|varchar|char)/i.test(type) ? text : trimmed];
}

const pathOf = (state) => `/api/state/${encodeURIComponent(state.operator)}/${encodeURIComponent(state.state)}`;

function lookup(state) {
  if (!state.keys.length || state.scope === "subtask") return empty("This state has no keys. Use Browse.");
  const types = state.keys.map((name) => state.columns.find((each) => each.name === name)?.type ?? "string");
  const name = state.keys.map((each, index) => `${each} ${types[index]}`).join(", ");
  const input = h("input", { type: "text", name: "key", required: true, autocomplete: "off", spellcheck: "false", placeholder: types.length > 1 ? '["a", 3]' : "" });
  return asking(h("label", { class: "field grow" }, h("span", null, `Key (${name})`), input), "Look up", async () => {
    const found = await post(`${pathOf(state)}/lookup`, { keys: [typedKey(input.value, types)] });
    const [answer] = found.answers;
    return [at(found), h("p", { class: "soft" }, "key ", h("code", { class: "wrap" }, answer.key.map(spelled).join(", "))), answer.found
      ? h("div", { class: "value" }, h("span", { class: "soft" }, [state.kind, found.type].filter(Boolean).join(", ")), entries(answer.value))
      : empty("No state for this key.")];
  }).element;
}

// The entries of a map, the items of a list, or a single value.
function entries(value) {
  const isPairs = Array.isArray(value) && value.length > 0 && value.every((each) => Array.isArray(each) && each.length === 2);
  if (isPairs) return table([{ name: "Entry", cell: (row) => shown(row[0]) }, { name: "Value", align: typeof value[0][1] === "number" ? "right" : null, cell: (row) => shown(row[1]) }], value, { caption: "Entries", cls: "data" });
  if (Array.isArray(value)) return h("ol", { class: "items", start: "0" }, value.map((each) => h("li", null, shown(each))));
  return h("p", { class: "big" }, shown(value));
}

function browse(state) {
  const body = h("div", { class: "answer" });
  const pages = [null];
  async function load() {
    try {
      const cursor = pages.at(-1);
      const found = await get(`${pathOf(state)}?limit=${PAGE_ROWS}${cursor ? `&after=${encodeURIComponent(cursor)}` : ""}`);
      replace(body, at(found), rows(found.columns, found.rows, (row, column) => row[column.name], `${state.operator}.${state.state}`),
        h("div", { class: "pager" },
          h("button", { type: "button", disabled: pages.length === 1, onclick: () => { pages.pop(); load(); } }, "Previous"),
          h("span", { class: "soft" }, `page ${pages.length}, at most ${plural(state.rows, "row")}`),
          h("button", { type: "button", disabled: found.after === null, onclick: () => { pages.push(found.after); load(); } }, "Next")));
    } catch (error) {
      // The epoch of the first page may be retired: start again with the newest one.
      replace(body, h("p", { class: "failed", role: "alert" }, error.message),
        h("div", { class: "pager" }, h("button", { type: "button", onclick: () => { pages.length = 1; load(); } }, "From the start")));
    }
  }
  load();
  return body;
}

const quoted = (name) => `"${name.replaceAll('"', '""')}"`;
let lastSql = null;

function sql(state) {
  const start = `select * from ${quoted(`${state.operator}.${state.state}`)}\norder by ${quoted(state.columns.some((each) => each.name === "value") ? "value" : state.columns[0].name)} desc\nlimit 20`;
  const input = h("textarea", { name: "sql", rows: 5, spellcheck: "false", autocomplete: "off" }, lastSql ?? start);
  const asked = asking(h("label", { class: "field grow" }, h("span", null, "Query (DuckDB; each state is a table; Ctrl+Enter runs it)"), input), "Run", async () => {
    lastSql = input.value;
    const found = await post("/api/sql", { sql: input.value, limit: SQL_ROWS });
    return [at(found), rows(found.columns, found.rows, (row, _column, index) => row[index], "Result"),
      h("p", { class: "soft" }, plural(found.rows.length, "row"), found.truncated ? ", there are more" : "")];
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      asked.run();
    }
  });
  return asked.element;
}

function diff(state, live) {
  const kept = live.epochs.map((each) => each.epoch).filter((each) => each >= live.oldestKept).toReversed();
  if (kept.length < 2) return empty("Only one epoch is kept: there is nothing to compare yet.");
  let [to, from] = kept;
  const options = kept.map((each) => [String(each), count(each)]);
  const fields = [
    choice("From epoch", options, String(from), (value) => { from = Number(value); }),
    choice("to epoch", options, String(to), (value) => { to = Number(value); }),
  ];
  return asking(fields, "Compare", async () => {
    const found = await get(`/api/diff/${encodeURIComponent(state.operator)}/${encodeURIComponent(state.state)}?from=${from}&to=${to}&limit=200`);
    const hasEntries = found.rows.some((row) => row.entry !== null && row.entry !== undefined);
    return [
      h("p", { class: "stamp" }, `${count(found.added)} added, ${count(found.changed)} changed, ${count(found.removed)} removed`),
      found.rows.length ? table([
        { name: "Change", head: false, cell: (row) => h("span", { class: `change is-${row.change}` }, row.change) },
        { name: "Key", head: false, cell: (row) => h("code", null, row.key.map(spelled).join(", ")) },
        ...(hasEntries ? [{ name: "Entry", head: false, cell: (row) => shown(row.entry) }] : []),
        { name: "Before", head: false, align: "right", cell: (row) => (row.change === "added" ? "" : shown(row.before)) },
        { name: "After", head: false, align: "right", cell: (row) => (row.change === "removed" ? "" : shown(row.after)) },
      ], found.rows, { caption: "Differences", cls: "data" }) : empty("No differences."),
      found.truncated ? h("p", { class: "soft" }, "There are more.") : null,
    ];
  }).element;
}
