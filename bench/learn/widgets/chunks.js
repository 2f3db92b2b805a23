// What two decoding requests feel when a long prompt arrives, by the size of its chunks.
rooflab.widget("chunks", ["chunks"], (root, [{ prompt, arrives, runs }]) => {
  const max = Math.max(...runs.flatMap(({ steps }) => steps.slice(1).map((step) => step.ms)));
  const part = ({ cells }) => Number((cells[2] ?? "").slice(1)) || 0; // the long prompt's tokens in a step
  const sizes = runs.map((run, i) => [i, run.chunk ?? "no chunks"]);
  rooflab.panel(root, { run: 0 }, [["run", "most prompt tokens in a step", sizes]], ({ run }) => {
    const { steps } = runs[run];
    const gaps = steps.slice(1).filter((step) => step.cells[0] === "d").map((step, i) => [
      `gap ${i + 1}${part(step) ? `, beside ${part(step)} tokens of the prompt` : ""}`, step.ms,
      part(step) ? "var(--write)" : "var(--read)"]);
    const prefill = steps.slice(arrives, steps.findLastIndex(part) + 1).map((step) => step.ms);
    return [`Longest gap of the others: ${rooflab.ms(Math.max(...gaps.map((gap) => gap[1])))}. TTFT of the prompt of `
      + `${prompt} tokens: ${rooflab.ms(rooflab.sum(prefill))}. Steps of its prefill: ${prefill.length}.`,
    rooflab.bars("Gaps of the others", gaps, rooflab.ms, max)];
  });
});
