rooflab.silu = (x) => x / (1 + Math.exp(-x));

rooflab.widget("swiglu", ["inside"], (root, [{ gate }]) => {
  const { svg, digits, silu } = rooflab;
  const [now, shown, said] = [{ gate: 1, up: 1 }, rooflab.el("div"), rooflab.status()];
  const [all, most, wide] = [gate.counts.reduce((a, b) => a + b), Math.max(...gate.counts), rooflab.wide()];
  const at = (x, y) => [wide / 2 + (x * (wide - 20)) / 16, 210 - 22 * y];
  const show = () => {
    const bin = Math.min(Math.floor((now.gate - gate.from) / gate.width), gate.counts.length - 1);
    const edge = (i) => gate.from + i * gate.width;
    const [thick, tall] = [at(gate.width)[0] - at(0)[0] - 2, (count) => (190 * count) / most];
    const bars = gate.counts.map((count, i) => svg("rect", { x: at(edge(i))[0] + 1, y: 210 - tall(count), width: thick,
      height: tall(count), fill: i === bin ? "var(--write)" : "var(--bar)" }));
    const ticks = [-8, -4, 0, 4, 8].map((x) =>
      svg("text", { x: at(x)[0], y: 238, "text-anchor": "middle", "font-size": 15, text: x }));
    const curve = Array.from({ length: 129 }, (_, i) => at(i / 8 - 8, silu(i / 8 - 8)).join(",")).join(" ");
    shown.replaceChildren(rooflab.drawing("silu, and how often each gate value occurred", wide, 244, ...bars, ...ticks,
      svg("path", { d: `M0 210H${wide}`, stroke: "var(--soft)" }),
      svg("polyline", { points: curve, fill: "none", stroke: "var(--read)", "stroke-width": 3 }),
      svg("circle", { cx: at(now.gate)[0], cy: at(0, silu(now.gate))[1], r: 7, fill: "var(--read)" })));
    const share = rooflab.percent(gate.counts[bin] / all);
    said.textContent = `silu(${digits(now.gate)}) × ${digits(now.up)} = ${digits(silu(now.gate) * now.up)}. `
      + `In the run, ${share} of the gate's values lie from ${edge(bin)} to ${edge(bin + 1)}.`;
  };
  const set = (name) => (value) => { now[name] = value; show(); };
  root.append(rooflab.range("Gate", { min: -8, max: 8, step: 0.1, value: 1 }, set("gate")),
    rooflab.range("Up", { min: -8, max: 8, step: 0.1, value: 1 }, set("up")), said, shown);
  show();
});
