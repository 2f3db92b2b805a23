rooflab.silu = (x) => x / (1 + Math.exp(-x));

rooflab.widget("swiglu", ["inside"], (root, [{ gate }]) => {
  const { el, svg, digits } = rooflab;
  const [now, shown, said] = [{ gate: 1, up: 1 }, el("div"), rooflab.status()];
  const [all, most] = [gate.counts.reduce((a, b) => a + b), Math.max(...gate.counts)];
  const set = (name) => (value) => { now[name] = value; show(); };
  const at = (x, y) => [320 + 38 * x, 210 - 22 * y];
  const show = () => {
    const bin = Math.min(Math.floor((now.gate - gate.from) / gate.width), gate.counts.length - 1);
    const [left, right] = [bin, bin + 1].map((i) => gate.from + i * gate.width);
    const bars = gate.counts.map((count, i) => {
      const height = (190 * count) / most;
      return svg("rect", { x: at(gate.from + i * gate.width)[0] + 1, y: 210 - height, width: 38 * gate.width - 2, height,
        fill: i === bin ? "var(--write)" : "var(--bar)" });
    });
    const curve = Array.from({ length: 129 }, (_, i) => at(i / 8 - 8, rooflab.silu(i / 8 - 8)).join(",")).join(" ");
    const [x, y] = at(now.gate, rooflab.silu(now.gate));
    const ticks = [-8, -4, 0, 4, 8].map((value) =>
      svg("text", { x: at(value)[0], y: 238, "text-anchor": "middle", "font-size": 15, text: value }));
    shown.replaceChildren(svg("svg", { viewBox: "0 0 640 244", role: "img", "aria-label": "silu, and the gate's values" },
      ...bars, svg("line", { x1: 0, x2: 640, y1: 210, y2: 210, stroke: "var(--soft)" }), ...ticks,
      svg("polyline", { points: curve, fill: "none", stroke: "var(--read)", "stroke-width": 3 }),
      svg("circle", { cx: x, cy: y, r: 7, fill: "var(--read)", stroke: "var(--page)", "stroke-width": 2 })));
    said.textContent = `silu(${digits(now.gate)}) × ${digits(now.up)} = ${digits(rooflab.silu(now.gate) * now.up)}. `
      + `In the run, ${rooflab.share(gate.counts[bin] / all)} of the gate's values lie from ${left} to ${right}.`;
  };
  root.append(rooflab.range("Gate", { min: -8, max: 8, step: 0.1, value: 1 }, set("gate")),
    rooflab.range("Up", { min: -8, max: 8, step: 0.1, value: 1 }, set("up")), said, shown);
  show();
});
