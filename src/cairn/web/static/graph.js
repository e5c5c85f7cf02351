// The picture of the job, drawn by the server, with the newest figures written into it.

import { bytes, count, empty, h, plural, short } from "./dom.js";

// Keys if they were counted, else entries: older epochs and broadcast state have only entries.
export function stateText(found) {
  if (!found.state_entries) return "no state";
  const many = found.state_keys ? plural(found.state_keys, "key") : found.state_entries === 1 ? "1 entry" : `${count(found.state_entries)} entries`;
  return `${many}, ${bytes(found.state_bytes ?? 0)}`;
}

// The operator that is fed by this source alone, if there is one: its rate is that of the source.
function fedAlone(source, edges, epoch) {
  const next = new Set([source]);
  for (let grown = true; grown;) {
    grown = false;
    for (const edge of edges)
      if (next.has(edge.from.node) && edge.way === "transform" && !next.has(edge.to)) {
        next.add(edge.to);
        grown = true;
      }
  }
  const fed = edges.filter((edge) => next.has(edge.from.node) && epoch?.operators?.[edge.to]);
  return fed.find((edge) => edges.filter((each) => each.to === edge.to).length === 1)?.to;
}

function figures(node, graph, epoch, rates) {
  if (graph.sources.some((each) => each.name === node)) {
    const fed = fedAlone(node, graph.edges, epoch);
    return fed === undefined ? [] : [`${short(rates[fed] ?? 0)} rows/s`];
  }
  const found = epoch?.operators?.[node];
  return found ? [`${short(rates[node] ?? 0)} rows/s`, stateText(found)] : [];
}

// `found` is the answer of /api/graph. Returns an element, and a function that updates its figures.
export function picture({ graph, drawing }) {
  if (drawing === null) return [empty("No start of this job has left a picture of it yet."), () => {}];
  const svg = document.importNode(new DOMParser().parseFromString(drawing, "image/svg+xml").documentElement, true);
  svg.classList.add("graph");
  const update = (epoch, rates = {}) => {
    for (const box of svg.querySelectorAll("[data-node]")) {
      const lines = figures(box.dataset.node, graph, epoch, rates);
      box.querySelectorAll(".figure").forEach((line, at) => (line.textContent = lines[at] ?? ""));
    }
  };
  return [h("div", { class: "graph-scroll", tabindex: "0", role: "region", "aria-label": "The job's graph" }, svg), update];
}
