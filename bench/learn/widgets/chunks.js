// What two decoding requests feel when a long prompt arrives, by the size of its chunks.
rooflab.widget("chunks", ["chunks"], (root, [{ prompt, arrives, runs }]) => {
  const [shown, status, at] = [rooflab.el("div"), rooflab.status(), { run: 0 }];
  const sum = (steps) => steps.reduce((all, step) => all + step.ms, 0);
  const max = Math.max(...runs.flatMap(({ steps }) => steps.slice(1).map((step) => step.ms)));
  const draw = () => {
    const { steps } = runs[at.run];
    const part = ({ cells }) => Number((cells[2] ?? "").slice(1)) || 0; // the long prompt's tokens in this step
    const gaps = steps.slice(1).filter((step) => step.cells[0] === "d").map((step, i) => ({
      label: `gap ${i + 1}${part(step) ? `, beside ${part(step)} tokens of the prompt` : ""}`, value: step.ms,
      text: rooflab.ms(step.ms), colour: part(step) ? "var(--write)" : "var(--read)" }));
    shown.replaceChildren(rooflab.bars("Gaps of the others", gaps, { max }));
    const prefill = steps.slice(arrives, steps.findLastIndex(part) + 1);
    const longest = Math.max(...gaps.map((gap) => gap.value));
    status.textContent = `Longest gap of the others: ${rooflab.ms(longest)}. TTFT of the prompt of ${prompt} tokens: `
      + `${rooflab.ms(sum(prefill))}, in ${prefill.length} ${prefill.length === 1 ? "step" : "steps"}.`;
  };
  const sizes = runs.map((run, i) => [i, run.chunk ?? "no chunks"]);
  root.append(...rooflab.choices(at, draw, [["run", "most prompt tokens in a step", sizes]]), status, shown);
  draw();
});
