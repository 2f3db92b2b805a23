// What the pages of `rooflab learn` and of `rooflab watch` share: elements, numbers, tables and bars.
const rooflab = {};

rooflab.el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
rooflab.svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") Object.entries(value).forEach(([event, f]) => node.addEventListener(event, f));
    else if (name === "text") node.textContent = value;
    else if (name === "style") node.style.cssText = value; // the policy of `watch` forbids the attribute
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
rooflab.button = (text, f) => rooflab.el("button", { type: "button", text, on: { click: f } });

// Numbers as the product prints them: at least three significant digits, powers of 1,000.
rooflab.digits = (x) => {
  if (x === 0 || !Number.isFinite(x)) return String(x);
  const places = Math.max(0, 2 - Number(x.toExponential(2).split("e")[1]));
  return x.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
};
rooflab.bytes = (n) => {
  const step = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => Math.abs(n) >= size);
  return step ? `${rooflab.digits(n / step[0])} ${step[1]}` : `${Math.round(n)} B`;
};
rooflab.ms = (x) => `${rooflab.digits(x)} ms`;
rooflab.percent = (x) => (x > 0 && x < 0.0005 ? "<0.1%" : `${(100 * x).toFixed(1)}%`);
rooflab.sum = (values) => values.reduce((sum, value) => sum + value, 0);
rooflab.median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];

// A table in a box that scrolls. A cell is a text, a number or a node; numbers stand at the right.
rooflab.table = (caption, head, rows) => {
  const { el } = rooflab;
  const isNumber = (cell) => typeof cell === "number" || /^([-\d.,]+( ?\S{1,3})?)?$/.test(String(cell));
  const side = (right) => (right ? "n" : null);
  const heads = head.map((text, column) =>
    el("th", { scope: "col", text, class: side(column && rows.every((row) => isNumber(row[column]))) }));
  const body = rows.map(([first, ...others]) => el("tr", {}, el("th", { scope: "row" }, first),
    ...others.map((value) => el("td", { class: side(isNumber(value)) }, value))));
  return el("div", { class: "box", tabindex: 0, role: "region", "aria-label": caption }, el("table", {},
    el("caption", { text: caption }), el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body)));
};

// A bar for each [name, value, colour, text], with the text at its right; `max` is the longest that fits.
rooflab.bars = (caption, rows, show, max = Math.max(...rows.map((row) => row[1]))) => {
  const { el } = rooflab;
  const bars = rows.map(([name, value, colour = "var(--read)", text = show(value)]) => el("div", { role: "listitem" },
    el("span", { class: "text" }, el("span", { text: name }), el("span", { text })),
    el("span", { class: "bar", "aria-hidden": "true",
      style: `width: ${max > 0 ? (100 * Math.min(value, max)) / max : 0}%; background: ${colour}` })));
  return el("div", { class: "bars", role: "list", "aria-label": caption }, ...bars);
};
