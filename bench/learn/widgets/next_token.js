rooflab.widget("next_token", ["run"], (root, [run]) => {
  const { el, percent } = rooflab;
  const [state, last] = [{ step: 0 }, run.steps.length - 1];
  const moves = [["Back", -1], ["Next token", 1]].map(([text, by]) => (show) =>
    rooflab.button(text, () => { state.step += by; show(); }));
  rooflab.panel(root, state, moves, ({ step }) => {
    root.querySelectorAll("button").forEach((button, i) => (button.disabled = step === i * last));
    const { token, top, ms } = run.steps[step];
    const before = run.answer.slice(0, step).map((one) => one[1]).join("");
    const rows = top.map(([id, name, p]) =>
      [rooflab.quoted(name) + (id === token ? " (taken)" : ""), p, id === token ? "var(--good)" : undefined]);
    return [`Token ${step + 1} of ${last + 1}, after ${rooflab.ms(ms)}`,
      el("p", {}, el("b", { text: run.question }), ` ${before} `, el("b", { text: "▁" })),
      rooflab.bars("The five likeliest next tokens", rows, percent, 1)];
  });
});
