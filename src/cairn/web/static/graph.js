// The job as a picture: boxes and lines lie where the server has put them, figures are the newest.

import { bytes, count, empty, h, plural, s, short } from "./dom.js";

const cut = (text, most = 30) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function figures(box, epoch, rates) {
  const found = epoch?.operators?.[box.id];
  if (!found) return [];
  return [`${short(rates[box.id] ?? 0)} rows/s`, stateText(found)];
}

// Keys where they were counted, else entries: older epochs and broadcast state have only those.
export function stateText(found) {
  if (!found.state_entries) return "no state";
  const many = found.state_keys ? plural(found.state_keys, "key") : found.state_entries === 1 ? "1 entry" : `${count(found.state_entries)} entries`;
  return `${many}, ${bytes(found.state_bytes ?? 0)}`;
}

// What a source gives is known where an operator is fed by it alone.
function given(box, drawing, epoch, rates) {
  const next = new Set([box.id]);
  for (let grown = true; grown;) {
    grown = false;
    for (const link of drawing.links)
      if (next.has(link.from) && link.way === "transform" && !next.has(link.to)) {
        next.add(link.to);
        grown = true;
      }
  }
  const fed = drawing.links.filter((link) => next.has(link.from) && epoch?.operators?.[link.to]);
  const alone = fed.find((link) => drawing.links.filter((each) => each.to === link.to).length === 1);
  if (!alone) return [];
  return [`${short(rates[alone.to] ?? 0)} rows/s`];
}

export function graph(drawing, epoch, rates = {}) {
  if (!drawing) return empty("No start of this job has left a picture of it yet.");
  const svg = s("svg", { class: "graph", width: drawing.width, height: drawing.height, viewBox: `0 0 ${drawing.width} ${drawing.height}`, role: "group", "aria-label": "The job's graph" },
    s("defs", null, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7.5, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { class: "arrow", d: "M0 0L8 4L0 8z" }))),
    drawing.columns.map((column) => s("text", { class: "column", x: column.x, y: 22 }, column.title)),
    drawing.frames.map((frame) => s("rect", { class: "frame", x: frame.x, y: frame.y, width: frame.width, height: frame.height, rx: 9 })),
    drawing.links.map((link) => s("path", { class: `link way-${link.way}`, d: link.path, "marker-end": "url(#arrow)" }, s("title", null, says(link)))),
    drawing.boxes.map((box) => node(box, box.kind === "source" ? given(box, drawing, epoch, rates) : figures(box, epoch, rates))));
  return h("div", { class: "graph-scroll", tabindex: "0", role: "region", "aria-label": "The job's graph" }, svg);
}

function says(link) {
  const how = link.by.length ? `by ${link.by.join(", ")}` : link.way;
  return `${link.from}${link.side ? `.${link.side}` : ""} → ${link.to}, ${how}`;
}

function node(box, lines) {
  const texts = [
    s("text", { class: "node-name", x: box.x + 12, y: box.y + 22 }, cut(box.name)),
    s("text", { class: "node-about", x: box.x + 12, y: box.y + 39 }, cut(box.about)),
    lines.map((line, at) => s("text", { class: "node-figure", x: box.x + 12, y: box.y + 58 + 17 * at }, line)),
  ];
  const shape = s("rect", { class: `node node-${box.kind}`, x: box.x, y: box.y, width: box.width, height: box.height, rx: 7 });
  const edge = s("rect", { class: `edge edge-${box.kind}`, x: box.x, y: box.y + 8, width: 3, height: box.height - 16, rx: 1.5 });
  const inner = [s("title", null, `${box.kind} ${box.name}: ${[box.about, ...lines].join(", ")}`), shape, edge, ...texts];
  if (box.kind !== "operator") return s("g", null, inner);
  return s("a", { href: `#/operators/${encodeURIComponent(box.id)}`, class: "node-link" }, inner);
}
