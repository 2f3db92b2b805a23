// The engine's scheduler in a recorded run: one row a request, one column a step.
rooflab.widget("trace", ["batching"], (root, [data]) => {
  const words = { w: "waits", x: "preempted", d: "decode", "": "" };
  const [state, total] = [{ mode: "continuous", count: 0 }, () => data.steps[state.mode].length];
  const controls = [["mode", "batches", Object.keys(data.steps)], rooflab.steps(state, total)];
  rooflab.panel(root, state, controls, ({ mode, count }) => {
    const steps = data.steps[mode].slice(0, count);
    const rows = data.requests.map(({ prompt, output }, i) => [`${"ABCDEF"[i]}: ${prompt} + ${output}`,
      ...steps.map(({ cells }) => words[cells[i] ?? ""] ?? `prefill ${cells[i].slice(1)}`)]);
    rows.push(["ms", ...steps.map(({ ms }) => rooflab.digits(ms))], ["free pages", ...steps.map(({ free }) => free)]);
    const busy = steps.flatMap((step) => step.cells).filter((cell) => /[pd]/.test(cell)).length;
    const [ms, mean] = [rooflab.sum(steps.map((step) => step.ms)), busy / (steps.length || 1)];
    return [`${steps.length} of ${total()} steps, ${rooflab.ms(ms)}. Mean requests in a step: ${rooflab.digits(mean)}.`,
    rooflab.table("Requests: tokens of the prompt + of the answer", ["step", ...steps.map((_, i) => i + 1)], rows)];
  });
});
