// The drivers of a job: who leads, who waits, and what would refuse them.

import { card, count, empty, h, span, table, when } from "./dom.js";

// Null for a job without a group.
export function driversCard(live) {
  const { lead } = live;
  if (!lead?.group_url) return null;
  const aside = h("code", { class: "where" }, lead.group_url);
  if (!lead.group) return card("Drivers", { aside }, empty("The drivers of this group are not visible from here. ", h("code", null, "cairn leader"), " lists them."));
  const { leader, standbys } = lead.group;
  const rows = [...(leader ? [{ ...leader, leads: true }] : []), ...standbys.filter((each) => each.identity !== leader?.identity)];
  const missing = leader ? null : "Nobody is known to lead the job.";
  const alone = standbys.some((each) => each.identity !== leader?.identity) ? null : "No driver waits: nobody would take over.";
  return card("Drivers", { aside, cls: "flush drivers" },
    [missing, alone].filter(Boolean).map((text) => h("p", { class: "warn-line" }, text)),
    rows.length ? table([
      { name: "Driver", cell: (row) => [h("b", null, row.host), `, pid ${row.pid}`, row.identity === lead.group.this?.identity ? h("span", { class: "soft" }, " (this one)") : null] },
      { name: "State", cell: (row) => h("span", { class: `chip is-${row.leads ? "running" : row.refusal === null ? "standby" : "failed"}` }, row.leads ? "leads" : row.refusal === null ? row.standby : `${row.standby}, refused`) },
      { name: "Since", cell: (row) => [when(row.since_ms), h("span", { class: "soft" }, `, ${span(live.nowMs - row.since_ms)}`)] },
      { name: "Epoch held", align: "right", cell: (row) => (row.leads ? "–" : count(row.epoch)) },
      { name: "Would take over", cls: "text", cell: (row) => (row.leads ? "–" : row.refusal === null ? "yes" : refusal(row)) },
      { name: "Dashboard", cell: (row) => page(row, lead.group.this) },
    ], rows, { caption: "Drivers of the job" }) : null);
}

// Pages are drawn again every few seconds: open ones stay open.
const opened = new Set();

// The first line, and the rest on demand.
export function refusal(row) {
  const [first, ...rest] = row.refusal.split("\n");
  const text = h("span", { class: "refused" }, `no: ${first}`);
  if (!rest.length) return text;
  const toggle = (event) => (event.target.open ? opened.add(row.identity) : opened.delete(row.identity));
  return h("details", { open: opened.has(row.identity), ontoggle: toggle }, h("summary", null, text), h("pre", null, rest.join("\n")));
}

// A link to the pages of another driver, unless only its own machine reaches them.
export function page(row, here) {
  if (row.identity === here?.identity) return "this page";
  if (!/^https?:\/\//.test(row.url ?? "")) return "none";
  const isLocal = /^https?:\/\/(127\.|localhost|\[::1\])/.test(row.url);
  if (isLocal && here && here.host !== row.host) return h("span", { class: "soft" }, "only on its machine");
  return h("a", { href: row.url, rel: "noreferrer" }, row.url.replace(/^https?:\/\//, ""));
}
