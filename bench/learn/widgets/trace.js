// The engine's scheduler in a recorded run: one row a request, one column a step.
rooflab.widget("trace", ["batching"], (root, [data]) => {
  const [shown, status, at] = [rooflab.el("div"), rooflab.status(), { mode: "continuous" }];
  const words = { w: "waits", x: "preempted", d: "decode", "": "" };
  const draw = (count) => {
    const steps = data.steps[at.mode].slice(0, count);
    const rows = data.requests.map(({ prompt, output }, i) => [`${"ABCDEF"[i]}: ${prompt} + ${output}`,
      ...steps.map(({ cells }) => words[cells[i] ?? ""] ?? `prefill ${cells[i].slice(1)}`)]);
    rows.push(["ms", ...steps.map(({ ms }) => rooflab.digits(ms))], ["free pages", ...steps.map(({ free }) => free)]);
    shown.replaceChildren(rooflab.table("Requests: tokens of the prompt + of the answer",
      ["step", ...steps.map((_, i) => i + 1)], rows));
    const ms = steps.reduce((sum, step) => sum + step.ms, 0);
    const busy = steps.flatMap((step) => step.cells).filter((cell) => /[pd]/.test(cell)).length;
    status.textContent = `${count} of ${data.steps[at.mode].length} steps, ${rooflab.ms(ms)}. Requests in a step: `
      + `${count ? rooflab.digits(busy / count) : 0} on average.`;
  };
  const [all, modes] = [() => data.steps[at.mode].length, ["mode", "batches", Object.keys(data.steps)]];
  root.append(...rooflab.choices(at, () => draw(all()), [modes]), rooflab.steps(all, draw), shown, status);
  draw(0);
});
