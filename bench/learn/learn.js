// What the widgets share: controls, charts, the recorded data, and the start of the page.
rooflab.quoted = (text) => JSON.stringify(text); // a token with its spaces and line ends, as Python shows it
rooflab.wide = () => Math.min(640, innerWidth - 64); // the width of a drawing whose letters keep their size on a phone
rooflab.drawing = (caption, width, height, ...parts) =>
  rooflab.svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": caption }, ...parts);
rooflab.curve = (points, attributes) =>
  rooflab.svg("polyline", { points: points.join(" "), fill: "none", "stroke-width": 2.5, ...attributes });
rooflab.status = () => rooflab.el("output", { "aria-live": "polite" });
// A row of texts, each with a small text below it; with `act(i)`, they are buttons.
rooflab.chips = (items, act) => rooflab.el("div", { class: "chips" }, ...items.map(([text, small], i) => {
  const chip = act ? rooflab.button(text, () => act(i)) : rooflab.el("span", { text });
  chip.append(rooflab.el("small", { text: small }));
  return chip;
}));

let ids = 0;
rooflab.range = (label, { min, max, step = 1, value, show = String }, onchange) => {
  const output = rooflab.el("output");
  const input = rooflab.el("input", { type: "range", min, max, step, id: `range-${++ids}` });
  const say = () => {
    output.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.value = value;
  input.addEventListener("input", () => { say(); onchange(Number(input.value)); });
  say();
  return rooflab.el("label", { for: input.id }, label, " ", output, input);
};
rooflab.choice = (label, options, value, onchange) => {
  const select = rooflab.el("select", { on: { change: () => onchange(select.value) } }, ...options.map((option) => {
    const [key, text = key] = [option].flat();
    return rooflab.el("option", { value: key, text });
  }));
  select.value = value;
  return rooflab.el("label", {}, label, " ", select);
};
// Buttons that show a run step by step: they set `state.count`, the number of steps shown, of `total()` steps.
rooflab.steps = (state, total) => (show) => {
  const to = (text, count) => rooflab.button(text, () => { state.count = count(); show(); });
  return rooflab.el("div", {}, to("next step", () => Math.min(state.count + 1, total())), to("all steps", total),
    to("from the start", () => 0));
};
// A widget of controls, a sentence, and a view. `draw(state)` returns the sentence and the nodes of the view.
// A control sets state[name]: [name, label, options of a select, or settings of a slider]. It can also be a function
// that returns a node and may draw again by its argument. A new choice shows all steps.
rooflab.panel = (root, state, controls, draw) => {
  const [said, view] = [rooflab.status(), rooflab.el("div")];
  const show = () => {
    const [sentence, ...nodes] = draw(state);
    said.textContent = sentence;
    view.replaceChildren(...nodes);
  };
  const made = controls.map((control) => {
    if (control instanceof Function) return control(show);
    const [[name, label, values], value] = [control, state[control[0]]];
    const set = (to) => { Object.assign(state, { [name]: to, count: Infinity }); show(); };
    return Array.isArray(values)
      ? rooflab.choice(label, values, value, (to) => set(typeof value === "number" ? Number(to) : to))
      : rooflab.range(label, { ...values, value }, set);
  });
  root.append(...made, said, view);
  show();
};

// A line chart of [label, [[x, y], ...]] series. A label stands at the last point of its line.
rooflab.lines = (caption, series, { x, y }) => {
  const [width, height, left, low] = [rooflab.wide(), 300, 56, 40];
  const points = series.flatMap(([, own]) => own);
  const [mostX, mostY] = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])) * 1.05 || 1);
  const at = ([px, py]) => [left + (px / mostX) * (width - left - 110), (height - low) * (1 - (0.9 * py) / mostY)];
  const text = (px, py, words, anchor) =>
    rooflab.svg("text", { x: px, y: py, "text-anchor": anchor, "font-size": 15, text: words });
  const scales = [0, 0.5, 1].flatMap((share) => {
    const [px, py] = at([share * mostX, share * mostY]);
    return [rooflab.curve([[left, py], [width - 110, py]], { stroke: "var(--line)", "stroke-width": 1 }),
      text(left - 6, py + 5, rooflab.digits(share * mostY), "end"),
      text(px, height - low + 18, rooflab.digits(share * mostX), "middle")];
  });
  const looks = [["var(--read)", ""], ["var(--write)", "7 4"]];
  const curves = series.flatMap(([label, own], i) => {
    const [stroke, dash] = looks[i];
    const [endX, endY] = at(own.at(-1));
    return [rooflab.curve(own.map(at), { stroke, "stroke-dasharray": dash }), text(endX + 6, endY + 5, label, "start")];
  });
  return rooflab.drawing(caption, width, height, ...scales, ...curves,
    text((width - 110 + left) / 2, height - 4, x, "middle"), text(4, 14, y, "start"));
};

// The recorded data: gzip in base64, unpacked once, when a widget first needs it.
const [unpacked, widgets] = [{}, {}];
rooflab.data = (name) => (unpacked[name] ??= unpack(name));
async function unpack(name) {
  const raw = Uint8Array.from(atob(document.getElementById(`data-${name}`).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

rooflab.widget = (name, data, make) => (widgets[name] = { data, make });
rooflab.open = async (root) => {
  if (root.dataset.state) return;
  root.dataset.state = "opening";
  const { data, make } = widgets[root.dataset.widget];
  make(root, await Promise.all(data.map(rooflab.data)));
  root.dataset.state = "open";
};

// Buttons of which one is pressed. A press of the button `i` calls `act(i)`.
function pressed(buttons, act) {
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    act(i);
  }));
}

function prediction(field) {
  const [buttons, status] = [field.querySelectorAll("button"), field.querySelector("[role=status]")];
  const right = buttons[field.dataset.right];
  pressed(buttons, (i) => {
    const word = buttons[i] === right ? "right" : "wrong";
    status.textContent = word === "right" ? "Right." : `No: it is ${right.textContent}.`;
    status.className = word;
    field.querySelector(".because").hidden = false;
    field.dataset.answered ??= word; // the first answer counts
    document.dispatchEvent(new CustomEvent("predicted"));
  });
}

rooflab.start = () => {
  for (const { parentNode: { id }, textContent: text } of document.querySelectorAll("main > section > h2")) {
    document.getElementById("contents-list").append(rooflab.el("li", {}, rooflab.el("a", { href: `#${id}`, text })));
  }
  document.querySelectorAll(".predict").forEach(prediction);
  for (const figure of document.querySelectorAll("figure.states")) {
    const states = figure.querySelectorAll(".state");
    pressed(figure.querySelectorAll("button"), (i) => states.forEach((state, j) => (state.hidden = j !== i)));
  }
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      watcher.unobserve(entry.target);
      rooflab.open(entry.target);
    }
  }, { rootMargin: "400px" });
  document.querySelectorAll("[data-widget]").forEach((root) => watcher.observe(root));
};
