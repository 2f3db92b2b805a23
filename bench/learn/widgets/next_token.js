rooflab.widget("next_token", ["run"], (root, [run]) => {
  const { el, button, percent } = rooflab;
  const [text, likely, said] = [el("p"), el("div"), rooflab.status()];
  let step = 0;
  const show = () => {
    const { token, top, ms } = run.steps[step];
    const before = run.answer.slice(0, step).map((one) => one[1]).join("");
    text.replaceChildren(el("b", { text: run.question }), ` ${before} `, el("b", { text: "▁" }));
    likely.replaceChildren(rooflab.bars("The five likeliest next tokens", top.map(([id, name, p]) => (
      { label: rooflab.quoted(name) + (id === token ? " (taken)" : ""), value: p, text: percent(p),
        colour: id === token ? "var(--good)" : null })), { max: 1 }));
    said.textContent = `Token ${step + 1} of ${run.steps.length}, after ${rooflab.ms(ms)}`;
    [back.disabled, next.disabled] = [step === 0, step === run.steps.length - 1];
  };
  const move = (by) => () => { step += by; show(); };
  const [back, next] = [button("Back", move(-1)), button("Next token", move(1))];
  root.append(text, likely, back, next, said);
  show();
});
