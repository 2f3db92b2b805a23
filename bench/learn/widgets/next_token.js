rooflab.quoted = (text) => JSON.stringify(text); // shows spaces and line ends, as Python does
rooflab.share = (p) => `${rooflab.digits(100 * p)} %`;

rooflab.widget("next_token", ["run"], (root, [run]) => {
  const { el, button, quoted } = rooflab;
  const [text, likely, said] = [el("p"), el("div"), rooflab.status()];
  let step = 0;
  const show = () => {
    const { token, top, ms } = run.steps[step];
    text.replaceChildren(el("b", { text: run.question }), " ", run.answer.slice(0, step).map((one) => one[1]).join(""),
      el("b", { text: " ▁" }));
    likely.replaceChildren(rooflab.bars("The five likeliest next tokens", top.map(([id, name, p]) => (
      { label: quoted(name) + (id === token ? " (taken)" : ""), value: p, text: rooflab.share(p),
        colour: id === token ? "var(--good)" : null })), { max: 1 }));
    said.textContent = `Token ${step + 1} of ${run.steps.length}, after ${rooflab.ms(ms)}`;
    [back.disabled, next.disabled] = [step === 0, step === run.steps.length - 1];
  };
  const back = button("Back", () => { step -= 1; show(); });
  const next = button("Next token", () => { step += 1; show(); });
  root.append(text, likely, back, next, said);
  show();
});
