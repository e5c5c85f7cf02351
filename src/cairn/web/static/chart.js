// SVG charts, drawn for the available width. The stylesheet has the colours.

import { clock, h, replace, s } from "./dom.js";

const GUTTER = 56;
const FOOT = 18;
const HEAD = 6;
// The width of a time below an axis.
const LABEL = 52;

// An element that is redrawn when its width changes. draw(width) returns an SVG element.
function responsive(draw, cls) {
  const frame = h("div", { class: `chart ${cls ?? ""}` });
  let width = 0;
  const again = () => {
    if (width > 0) replace(frame, draw(width));
  };
  new ResizeObserver(() => {
    const now = Math.floor(frame.clientWidth);
    if (now !== width) {
      width = now;
      again();
    }
  }).observe(frame);
  frame.redraw = again;
  return frame;
}

// Round values from 0 to at least the top: 2 to 4 of them.
export function ticks(top, format) {
  if (!(top > 0)) return [0];
  const inUnit = (unit) => plainTicks(top / unit).map((each) => each * unit);
  const unitOf = (most) => format?.unit?.(most) ?? 1;
  const found = inUnit(unitOf(top));
  // The last one, rounded up, may need a larger unit: then all must be round in that unit.
  const unit = unitOf(found.at(-1));
  return unit === unitOf(top) ? found : inUnit(unit);
}

// A single very high value must not flatten all others: it is cut off, with a mark.
function topOf(values, isRobust) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  const top = Math.max(0, known.at(-1) ?? 0);
  const usual = known[Math.floor(known.length * 0.95)] ?? 0;
  return isRobust && known.length >= 10 && top > 2 * usual ? 1.4 * usual : top;
}

function plainTicks(top) {
  const rough = top / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = 0; at < top + step * 0.999; at += step) found.push(at);
  return found;
}

function yAxis(found, y, width, format) {
  const label = format.axis ?? format;
  return found.map((value) => [
    s("line", { class: value === 0 ? "axis" : "grid", x1: GUTTER, x2: width, y1: y(value), y2: y(value) }),
    s("text", { class: "tick", x: GUTTER - 8, y: y(value) + 3.5, "text-anchor": "end" }, label(value, found.at(-1))),
  ]);
}

// Times below the chart: as many as fit, without overlap.
function xAxis(times, x, width, y) {
  const many = Math.max(2, Math.min(6, times.length, Math.floor((width - GUTTER) / 110)));
  const indexes = [...new Set(Array.from({ length: many }, (_, at) => Math.round((at / (many - 1)) * (times.length - 1))))];
  let end = -Infinity;
  return indexes.map((index) => {
    const left = Math.max(GUTTER, Math.min(x(index) - LABEL / 2, width - LABEL));
    if (left < end + 8) return null;
    end = left + LABEL;
    return s("text", { class: "tick", x: left + LABEL / 2, y: y + 13, "text-anchor": "middle" }, clock(times[index]));
  });
}

// One line per series over epochs. series: [{name, cls, of(epoch)}]; null is a gap.
export function lines({ title, series, format, isRobust = false, height = 150 }) {
  let epochs = [];
  const readouts = series.map(() => h("b", null, "–"));
  const at = h("span", { class: "readout-at" });
  const legend = h("div", { class: "legend" },
    series.map((each, index) => h("span", { class: "legend-item" }, h("i", { class: `swatch ${each.cls}` }), `${each.name} `, readouts[index])), at);

  function read(index) {
    const epoch = epochs[index];
    series.forEach((each, which) => {
      const value = epoch ? each.of(epoch) : null;
      readouts[which].textContent = value === null || value === undefined ? "–" : format(value);
    });
    at.textContent = epoch && index < epochs.length - 1 ? `epoch ${epoch.epoch}` : "";
  }

  const frame = responsive((width) => {
    const values = series.map((each) => epochs.map((epoch) => each.of(epoch)));
    const marks = ticks(topOf(values.flat(), isRobust), format);
    const most = marks.at(-1) || 1;
    const inner = height - FOOT - HEAD;
    const y = (value) => HEAD + inner * (1 - Math.min(value, most) / most);
    const cutOff = [...new Set(values.flatMap((line) => line.flatMap((value, index) => (value > most ? [index] : []))))];
    const x = (index) => GUTTER + 2 + (width - GUTTER - 6) * (epochs.length < 2 ? 1 : index / (epochs.length - 1));
    const cross = s("line", { class: "cross", y1: HEAD, y2: HEAD + inner, x1: -9, x2: -9 });
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${series.map((each, which) => `${each.name} ${readouts[which].textContent}`).join(", ")}` },
      yAxis(marks, y, width, format),
      epochs.length ? xAxis(epochs.map((each) => each.wall_ms), x, width, HEAD + inner) : null,
      values.map((line, which) => paths(line, x, y, series[which].cls, HEAD + inner, series.length === 1)),
      cutOff.map((index) => s("path", { class: "cut-off", d: `M${x(index) - 4} ${HEAD + 3}h8l-4 -6z` }, s("title", null, "cut off: the value is higher"))),
      cross);
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const share = (event.clientX - box.left - GUTTER - 2) / Math.max(1, width - GUTTER - 6);
      const index = Math.max(0, Math.min(epochs.length - 1, Math.round(share * (epochs.length - 1))));
      for (const end of ["x1", "x2"]) cross.setAttribute(end, x(index));
      read(index);
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerleave", () => {
      for (const end of ["x1", "x2"]) cross.setAttribute(end, -9);
      read(epochs.length - 1);
    });
    return svg;
  });
  const element = h("figure", { class: "figure" }, h("figcaption", null, h("h3", null, title), legend), frame);
  element.show = (found) => {
    epochs = found;
    read(epochs.length - 1);
    frame.redraw();
  };
  return element;
}

function paths(values, x, y, cls, floor, isFilled) {
  const runs = [];
  values.forEach((value, index) => {
    if (value === null || value === undefined) return;
    if (index === 0 || values[index - 1] === null || values[index - 1] === undefined) runs.push([]);
    runs.at(-1).push([x(index), y(value)]);
  });
  return runs.map((run) => {
    const path = run.map(([px, py], at) => `${at ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    if (run.length === 1) return s("circle", { class: `dot ${cls}`, cx: run[0][0], cy: run[0][1], r: 2.5 });
    return [
      isFilled ? s("path", { class: `area ${cls}`, d: `${path}L${run.at(-1)[0].toFixed(1)} ${floor}L${run[0][0].toFixed(1)} ${floor}Z` }) : null,
      s("path", { class: `line ${cls}`, d: path }),
    ];
  });
}

// A line without axes, for a tile.
export function spark(values, cls) {
  const width = 120;
  const height = 26;
  const known = values.filter((value) => value !== null && value !== undefined);
  const top = Math.max(...known, 0) || 1;
  const low = Math.min(...known, top) * 0.9;
  const y = (value) => 2 + (height - 4) * (1 - (value - low) / (top - low || 1));
  const x = (index) => 1 + ((width - 2) * index) / Math.max(1, values.length - 1);
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    known.length > 1 ? paths(values, x, y, cls, height, true) : null);
}

// A stacked bar per epoch. Each bar is a link.
export function bars({ title, parts, href, format, height = 180 }) {
  let epochs = [];
  let chosen = null;
  const readouts = parts.map(() => h("b", null, "–"));
  const at = h("span", { class: "readout-at" });
  const legend = h("div", { class: "legend" },
    parts.map(([id, name, note], index) => h("span", { class: "legend-item", title: note }, h("i", { class: `swatch block p-${id}` }), `${name} `, readouts[index])), at);

  function read(epoch) {
    parts.forEach(([id], index) => {
      const isKnown = epoch && !(id === "commit" && epoch.commit_ms === null);
      readouts[index].textContent = isKnown ? format(epoch.parts[id]) : "–";
    });
    at.textContent = epoch ? `epoch ${epoch.epoch}, ${format(total(epoch))}` : "";
  }
  const total = (epoch) => parts.reduce((sum, [id]) => sum + epoch.parts[id], 0);

  const frame = responsive((width) => {
    const room = Math.max(1, Math.floor((width - GUTTER) / 6));
    const shown = epochs.slice(-room);
    const pitch = Math.min(22, (width - GUTTER) / Math.max(shown.length, 24));
    const marks = ticks(topOf(shown.map(total), true), format);
    const most = marks.at(-1) || 1;
    const inner = height - FOOT - HEAD;
    const y = (value) => HEAD + inner * (1 - Math.min(value, most) / most);
    const gap = pitch > 8 ? 2 : 1;
    const x = (index) => GUTTER + index * pitch + gap / 2;
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": title },
      yAxis(marks, y, width, format),
      shown.length ? xAxis(shown.map((each) => each.wall_ms), (index) => x(index) + pitch / 2, Math.min(width, GUTTER + Math.max(LABEL, shown.length * pitch)), HEAD + inner) : null,
      shown.map((epoch, index) => {
        let below = 0;
        const rough = epoch.timings.attempts > 1 || epoch.restored > 0;
        return s("a", { href: href(epoch), class: `epoch-bar${epoch.epoch === chosen ? " chosen" : ""}`, "aria-label": `epoch ${epoch.epoch}: ${format(total(epoch))}${rough ? ", with retries" : ""}`, onfocus: () => read(epoch), onpointerenter: () => read(epoch) },
          s("rect", { class: "hit", x: x(index) - gap / 2, y: HEAD, width: pitch, height: inner }),
          parts.map(([id]) => {
            const value = epoch.parts[id];
            if (!(value > 0)) return null;
            below += value;
            return s("rect", { class: `p-${id}`, x: x(index), y: y(below), width: pitch - gap, height: Math.max(0.3, y(below - value) - y(below)) });
          }),
          total(epoch) > most ? s("path", { class: "cut", d: `M${x(index) - 1} ${HEAD + 7}l${pitch} -4` }) : null,
          rough ? s("path", { class: "flag", d: `M${x(index) + (pitch - gap) / 2 - 3} ${Math.max(1, y(below) - 7)}h6l-3 5z` }) : null);
      }));
    svg.addEventListener("pointerleave", () => read(current()));
    return svg;
  }, "bars");
  const current = () => epochs.find((each) => each.epoch === chosen) ?? epochs.at(-1);
  const element = h("figure", { class: "figure" }, h("figcaption", null, legend), frame);
  element.show = (found, number = null) => {
    epochs = found;
    chosen = number;
    read(current());
    frame.redraw();
  };
  return element;
}

// Cells in rows, darker for more. cells: [{value, text}]; onread(text) is called for the cell under the pointer.
export function heat({ cells, columns, label, onread }) {
  const top = Math.max(0, ...cells.map((each) => each.value));
  const shade = (value) => (value === 0 || top === 0 ? 0 : 1 + Math.min(8, Math.floor((value / top) * 8.999)));
  return responsive((width) => {
    const gutter = 44;
    const fit = width < 560 ? Math.min(columns, 16) : columns;
    const size = (width - gutter) / fit;
    const height = Math.max(18, Math.min(size, 28));
    const rows = Math.ceil(cells.length / fit);
    return s("svg", { width, height: rows * height + 2, viewBox: `0 0 ${width} ${rows * height + 2}`, role: "group", "aria-label": label },
      Array.from({ length: rows }, (_, row) => s("text", { class: "tick", x: gutter - 8, y: row * height + height / 2 + 4, "text-anchor": "end" }, cells[row * fit].first)),
      cells.map((cell, index) => s("rect", {
        class: `cell heat-${shade(cell.value)}${cell.starts ? " starts" : ""}`, x: gutter + (index % fit) * size + 0.75, y: Math.floor(index / fit) * height + 0.75,
        width: size - 1.5, height: height - 1.5, rx: 2, onpointerenter: () => onread(cell.text),
      }, s("title", null, cell.text))));
  }, "heat");
}

// One bar per item beside its name, with a mark at the mean.
export function shares(items, format) {
  const top = Math.max(...items.map((each) => each.value), 1);
  const mean = items.reduce((sum, each) => sum + each.value, 0) / Math.max(1, items.length);
  return h("ol", { class: "shares" }, items.map((each) => h("li", null,
    h("span", { class: "shares-name" }, each.name),
    h("span", { class: "shares-bar", "aria-hidden": "true" },
      h("i", { style: { width: `${(each.value / top) * 100}%` } }),
      each.mean === false ? null : h("u", { style: { left: `${(mean / top) * 100}%` } })),
    h("span", { class: "num" }, format(each.value)))));
}
