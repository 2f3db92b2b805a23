rooflab.silu = (x) => x / (1 + Math.exp(-x));

rooflab.widget("swiglu", ["inside"], (root, [{ gate: { from, width, counts } }]) => {
  const { svg, digits, silu } = rooflab;
  const [all, most, wide] = [rooflab.sum(counts), Math.max(...counts), rooflab.wide()];
  const at = (x, y) => [wide / 2 + (x * (wide - 20)) / 16, 210 - 22 * y];
  const [edge, range] = [(i) => from + i * width, { min: -8, max: 8, step: 0.1 }];
  rooflab.panel(root, { gate: 1, up: 1 }, [["gate", "Gate", range], ["up", "Up", range]], ({ gate, up }) => {
    const bin = Math.min(Math.floor((gate - from) / width), counts.length - 1);
    const bars = counts.map((count, i) => {
      const [[x], [next], height] = [at(edge(i)), at(edge(i + 1)), (190 * count) / most];
      const fill = i === bin ? "var(--write)" : "var(--bar)";
      return svg("rect", { x: x + 1, y: 210 - height, width: next - x - 2, height, fill });
    });
    const ticks = [-8, -4, 0, 4, 8].map((x) =>
      svg("text", { x: at(x)[0], y: 238, "text-anchor": "middle", "font-size": 15, text: x }));
    const curve = Array.from({ length: 129 }, (_, i) => at(i / 8 - 8, silu(i / 8 - 8)));
    const [cx, cy] = at(gate, silu(gate));
    return [`silu(${digits(gate)}) × ${digits(up)} = ${digits(silu(gate) * up)}. In the run, `
      + `${rooflab.percent(counts[bin] / all)} of the gate's values lie from ${edge(bin)} to ${edge(bin + 1)}.`,
    rooflab.drawing("silu, and how often each gate value occurred", wide, 244, ...bars, ...ticks,
      rooflab.curve([[0, 210], [wide, 210]], { stroke: "var(--soft)", "stroke-width": 1 }),
      rooflab.curve(curve, { stroke: "var(--read)" }),
      svg("circle", { cx, cy, r: 7, fill: "var(--read)" }))];
  });
});
