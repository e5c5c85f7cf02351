// Elements and text. Data of a job is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((each) => each !== null && each !== undefined && each !== false)
    .map((each) => (each instanceof Node ? each : document.createTextNode(String(each)))));
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

// Words

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const two = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));
export const decimal = (n) => (n === null || n === undefined ? "–" : two.format(n));

export function short(n) {
  if (n === null || n === undefined) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(n) >= size * 0.9995) return `${two.format(n / size).slice(0, 5).replace(/\.$/, "")} ${unit}`;
  return two.format(n);
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  let left = n;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (left < 1000) return unit === "B" ? `${whole.format(left)} B` : `${left.toFixed(1)} ${unit}`;
    left /= 1024;
  }
  return `${left.toFixed(1)} TiB`;
}

export function millis(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return ms > 0 && ms < 10 ? `${ms.toFixed(1)} ms` : `${whole.format(ms)} ms`;
}

// The largest unit, or two of them where the first is small: 12 s, 3 min, 2 h 10 min, 4 d.
export function span(ms) {
  if (ms === null || ms === undefined) return "–";
  const seconds = Math.max(0, ms / 1000);
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${whole.format(Math.floor(seconds / 86400))} d`;
}

// What an axis counts in: round figures of it are round to people too.
bytes.unit = (top) => 1024 ** Math.max(0, Math.min(4, Math.floor(Math.log(Math.max(top, 1)) / Math.log(1000))));
span.unit = (top) => [86400000, 3600000, 60000].find((unit) => top >= 2 * unit) ?? 1000;
span.axis = (ms, top) => {
  const unit = span.unit(top);
  return `${two.format(ms / unit)} ${{ 86400000: "d", 3600000: "h", 60000: "min", 1000: "s" }[unit]}`;
};
millis.axis = (ms, top) => (top >= 1000 ? `${two.format(ms / 1000)} s` : `${whole.format(ms)} ms`);
bytes.axis = (n, top) => {
  const unit = bytes.unit(top);
  return `${two.format(n / unit)} ${["B", "KiB", "MiB", "GiB", "TiB"][Math.round(Math.log(unit) / Math.log(1024))]}`;
};

const pad = (n) => String(n).padStart(2, "0");

export function clock(ms) {
  const at = new Date(ms);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

export function day(ms) {
  const at = new Date(ms);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

// A time as people of the browser's time zone read it; whole and in UTC as its title.
export function when(ms, { dated = true } = {}) {
  if (ms === null || ms === undefined) return "–";
  const text = dated ? `${day(ms)} ${clock(ms)}` : clock(ms);
  return h("time", { datetime: new Date(ms).toISOString(), title: new Date(ms).toISOString() }, text);
}

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// Pieces that pages share

export function card(title, { aside = null, id = null, cls = "" } = {}, ...children) {
  const name = id ?? `card-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  return h("section", { class: `card ${cls}`, "aria-labelledby": name },
    h("div", { class: "card-head" }, h("h2", { id: name }, title), aside), ...children);
}

export const empty = (...said) => h("p", { class: "empty" }, ...said);

// columns: [{name, align, cell(row)}]; a cell is text or an element.
export function table(columns, rows, { caption, cls = "" } = {}) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: cls },
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, columns.map((c) => h("th", { scope: "col", class: c.align === "right" ? "num" : null }, c.name, c.note ? h("small", null, c.note) : null)))),
      h("tbody", null, rows.map((row) => h("tr", null, columns.map((c, at) =>
        h(at === 0 && c.head !== false ? "th" : "td", { scope: at === 0 && c.head !== false ? "row" : null, class: [c.align === "right" ? "num" : "", c.cls ?? ""].join(" ").trim() || null }, c.cell(row)))))),
    ));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, ...value]) => [h("dt", null, name), h("dd", null, ...value)]));
}

export function choice(label, options, value, onchange) {
  const select = h("select", { onchange: () => onchange(select.value) },
    options.map(([id, text]) => h("option", { value: id, selected: id === value }, text)));
  return h("label", { class: "field inline" }, h("span", null, label), select);
}
