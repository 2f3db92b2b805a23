// What every widget shares: elements, controls, tables and charts, the recorded data, and the start of the page.
const rooflab = { widgets: {}, unpacked: {} };

rooflab.el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
rooflab.svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") Object.entries(value).forEach(([event, f]) => node.addEventListener(event, f));
    else if (name === "text") node.textContent = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Numbers as the product prints them: three significant digits, powers of 1,000.
rooflab.digits = (x) => {
  if (x === 0 || !Number.isFinite(x)) return String(x);
  const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(x))));
  return Number(x.toPrecision(3)).toLocaleString("en-US", { minimumFractionDigits: Math.min(places, 6) });
};
rooflab.bytes = (n) => {
  const step = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => Math.abs(n) >= size);
  return step ? `${rooflab.digits(n / step[0])} ${step[1]}` : `${Math.round(n)} B`;
};
rooflab.ms = (x) => `${rooflab.digits(x)} ms`;
rooflab.percent = (x) => (x > 0 && x < 0.0005 ? "<0.1%" : `${(100 * x).toFixed(1)}%`);
rooflab.quoted = (text) => JSON.stringify(text); // a token with its spaces and line ends, as Python shows it
rooflab.wide = () => Math.min(640, innerWidth - 64); // the width of a drawing whose letters keep their size on a phone
rooflab.drawing = (caption, width, height, ...parts) =>
  rooflab.svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": caption }, ...parts);

let ids = 0;
rooflab.range = (label, { min, max, step = 1, value, show = String }, onchange) => {
  const output = rooflab.el("output", { text: show(value) });
  const input = rooflab.el("input", { type: "range", min, max, step, id: `range-${++ids}` });
  input.value = value;
  input.setAttribute("aria-valuetext", show(value));
  input.addEventListener("input", () => {
    output.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
    onchange(Number(input.value));
  });
  const node = rooflab.el("label", { for: input.id }, label, " ", output, input);
  return Object.assign(node, { input });
};
rooflab.choice = (label, options, value, onchange) => {
  const select = rooflab.el("select", { on: { change: () => onchange(select.value) } });
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    select.append(rooflab.el("option", { value: key, text }));
  }
  select.value = value;
  return Object.assign(rooflab.el("label", {}, label, " ", select), { select });
};
rooflab.button = (text, f) => rooflab.el("button", { type: "button", text, on: { click: f } });
// Buttons that show a recorded run step by step: `draw(n)` shows its first `n` steps, of `total()` steps.
rooflab.steps = (total, draw) => {
  let shown = 0;
  const to = (text, count) => rooflab.button(text, () => draw((shown = count())));
  return rooflab.el("div", {}, to("next step", () => Math.min(shown + 1, total())), to("all steps", total),
    to("from the start", () => 0));
};
// A select for each [name, label, options]: it sets `chosen[name]`, then calls `draw`.
rooflab.choices = (chosen, draw, selects) => selects.map(([name, label, options]) =>
  rooflab.choice(label, options, chosen[name], (value) => {
    chosen[name] = typeof chosen[name] === "number" ? Number(value) : value;
    draw();
  }));
rooflab.status = () => rooflab.el("output", { "aria-live": "polite" });

rooflab.table = (caption, head, rows) => {
  const isNumber = (cell) => typeof cell === "number" || /^[-\d.,]+( ?\S{1,3})?$/.test(String(cell));
  const cell = (tag, value, extra = {}) =>
    value instanceof Node ? rooflab.el(tag, extra, value)
      : rooflab.el(tag, { text: value, class: isNumber(value) ? "n" : null, ...extra });
  const body = rows.map(([first, ...others]) =>
    rooflab.el("tr", {}, cell("th", first, { scope: "row", class: null }), ...others.map((value) => cell("td", value))));
  const table = rooflab.el("table", {}, rooflab.el("caption", { text: caption }),
    rooflab.el("thead", {}, rooflab.el("tr", {}, ...head.map((text, column) =>
      cell("th", text, { scope: "col", class: column && rows.every((row) => isNumber(row[column])) ? "n" : null })))),
    rooflab.el("tbody", {}, ...body));
  return rooflab.el("div", { class: "box", tabindex: 0, role: "region", "aria-label": caption }, table);
};

// Bars by name, each with its number as text; `max` is the length of the longest bar that fits.
rooflab.bars = (caption, rows, { max } = {}) => {
  const most = max ?? Math.max(...rows.map((row) => row.value));
  const bars = rows.map(({ label, value, text, colour }) =>
    rooflab.el("div", { role: "listitem" },
      rooflab.el("span", { class: "text" }, rooflab.el("span", { text: label }), rooflab.el("span", { text })),
      rooflab.el("span", { class: "bar", "aria-hidden": "true",
        style: `width: ${most > 0 ? (100 * Math.min(value, most)) / most : 0}%;${colour ? `background: ${colour}` : ""}` })));
  return rooflab.el("div", { class: "bars", role: "list", "aria-label": caption }, ...bars);
};

// A line chart: series are {label, points: [[x, y], ...], dash}; the last point of each carries its label.
rooflab.lines = (caption, series, { x, y }) => {
  const [width, height, left, low] = [rooflab.wide(), 300, 56, 40];
  const points = series.flatMap((one) => one.points);
  const [mostX, mostY] = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])) * 1.05 || 1);
  const at = ([px, py]) => [left + (px / mostX) * (width - left - 110), (height - low) * (1 - (0.9 * py) / mostY)];
  const drawing = rooflab.drawing(caption, width, height);
  const text = (px, py, words, anchor) =>
    rooflab.svg("text", { x: px, y: py, "text-anchor": anchor, "font-size": 15, text: words });
  for (const share of [0, 0.5, 1]) {
    const [px, py] = [at([share * mostX, 0]), at([0, share * mostY])];
    drawing.append(
      rooflab.svg("line", { x1: left, x2: width - 110, y1: py[1], y2: py[1], stroke: "var(--line)" }),
      text(left - 6, py[1] + 5, rooflab.digits(share * mostY), "end"),
      text(px[0], height - low + 18, rooflab.digits(share * mostX), "middle"));
  }
  drawing.append(text((width - 110 + left) / 2, height - 4, x, "middle"), text(4, 14, y, "start"));
  series.forEach(({ label, points: own, dash }, index) => {
    const colour = ["var(--read)", "var(--write)", "var(--good)", "var(--lost)"][index % 4];
    const path = own.map((point) => at(point).join(",")).join(" ");
    const end = at(own[own.length - 1]);
    drawing.append(
      rooflab.svg("polyline", { points: path, fill: "none", stroke: colour, "stroke-width": 2.5,
        "stroke-dasharray": dash ?? ["", "7 4", "2 4", "9 3 2 3"][index % 4] }),
      text(end[0] + 6, end[1] + 5, label, "start"));
  });
  return drawing;
};

// The recorded data: gzip in base64, unpacked once, when a widget first needs it.
rooflab.data = (name) => (rooflab.unpacked[name] ??= unpack(name));
async function unpack(name) {
  const raw = Uint8Array.from(atob(document.getElementById(`data-${name}`).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

rooflab.widget = (name, data, make) => (rooflab.widgets[name] = { data, make });
rooflab.open = async (root) => {
  if (root.dataset.state) return;
  root.dataset.state = "opening";
  const { data, make } = rooflab.widgets[root.dataset.widget];
  make(root, await Promise.all(data.map(rooflab.data)));
  root.dataset.state = "open";
};

function predictions() {
  for (const field of document.querySelectorAll(".predict")) {
    const buttons = [...field.querySelectorAll("button")];
    buttons.forEach((button, index) => button.addEventListener("click", () => {
      const right = index === Number(field.dataset.right);
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      const status = field.querySelector("[role=status]");
      status.textContent = right ? "Right." : `No: it is ${buttons[field.dataset.right].textContent}.`;
      status.className = right ? "right" : "wrong";
      field.querySelector(".because").hidden = false;
      field.dataset.answered ??= right ? "right" : "wrong"; // the first answer counts
      document.dispatchEvent(new CustomEvent("predicted"));
    }));
  }
}

function states() {
  for (const figure of document.querySelectorAll("figure.states")) {
    const [buttons, shown] = [figure.querySelectorAll("button"), figure.querySelectorAll(".state")];
    buttons.forEach((button, index) => button.addEventListener("click", () => {
      buttons.forEach((other, i) => other.setAttribute("aria-pressed", String(i === index)));
      shown.forEach((state, i) => (state.hidden = i !== index));
    }));
  }
}

rooflab.start = () => {
  const list = document.getElementById("contents-list");
  for (const heading of document.querySelectorAll("main > section > h2")) {
    list.append(rooflab.el("li", {}, rooflab.el("a", { href: `#${heading.parentNode.id}`, text: heading.textContent })));
  }
  predictions();
  states();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      watcher.unobserve(entry.target);
      rooflab.open(entry.target);
    }
  }, { rootMargin: "400px" });
  document.querySelectorAll("[data-widget]").forEach((root) => watcher.observe(root));
};
