// The last epochs as lines.

import { lines } from "./chart.js";
import { bytes, card, choice, count, h, millis, replace, short, span } from "./dom.js";

const CHARTS = [
  ["Throughput of each epoch", [["rows/s", "c-rows", (e) => e.rows_per_s]], short],
  ["Rows in an epoch", [["in", "c-rows", (e) => e.rows_in], ["out", "c-out", (e) => e.rows_out]], short],
  ["Epoch time", [["whole", "c-time", (e) => e.epoch_ms], ["processing", "c-rows", (e) => e.parts.process], ["commit", "c-commit", (e) => e.commit_ms]], millis, true],
  ["Event-time lag at each commit", [["commit − watermark", "c-lag", (e) => (e.watermark_ms === null ? null : e.wall_ms - e.watermark_ms)]], span],
  ["Keys and entries", [["keys", "c-keys", (e) => e.state_keys], ["entries", "c-delta", (e) => e.state_entries]], short],
  ["State size", [["bytes", "c-keys", (e) => e.state_bytes]], bytes],
  ["Written", [["delta", "c-delta", (e) => e.delta_bytes], ["base", "c-base", (e) => e.base_bytes]], bytes],
  ["Rows put aside", [["late", "c-late", (e) => e.late_rows + e.untimed_rows], ["failed", "c-error", (e) => e.error_rows]], count],
];

export function charts(root, live) {
  let window = 300;
  const figures = CHARTS.map(([title, series, format, isRobust = false]) =>
    lines({ title, format, isRobust, series: series.map(([name, cls, of]) => ({ name, cls, of })) }));
  const pick = choice("Epochs", [["60", "last 60"], ["300", "last 300"], ["1000", "all"]], String(window), (value) => {
    window = Number(value);
    draw();
  });
  replace(root, h("div", { class: "title-row" }, h("h1", null, "Charts"), pick), h("div", { class: "charts" }, figures.map((figure) => h("div", { class: "card" }, figure))));

  function draw() {
    const epochs = live.epochs.slice(-window);
    for (const figure of figures) figure.show(epochs);
  }
  draw();
  return { update: draw };
}

// Charts of one operator.
export function operatorCharts(uid) {
  const of = (read) => (each) => (each.operators[uid] ? read(each.operators[uid], each) : null);
  const figures = [
    lines({ title: "Rows per second of each epoch", format: short, series: [{ name: "in", cls: "c-rows", of: of((o, e) => o.rows_in / (Math.max(e.epoch_ms, 1) / 1000)) }] }),
    lines({ title: "Keys and entries", format: short, series: [{ name: "keys", cls: "c-keys", of: of((o) => o.state_keys) }, { name: "entries", cls: "c-out", of: of((o) => o.state_entries) }, { name: "changed", cls: "c-delta", of: of((o) => o.entries_changed) }] }),
    lines({ title: "Delta", format: bytes, series: [{ name: "bytes", cls: "c-delta", of: of((o) => o.delta_bytes) }] }),
  ];
  const element = h("div", { class: "charts three" }, figures.map((figure) => h("div", { class: "card" }, figure)));
  element.show = (epochs) => figures.forEach((figure) => figure.show(epochs));
  return element;
}
