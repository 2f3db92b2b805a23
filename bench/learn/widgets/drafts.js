// A recorded run with drafts.  The model draws a token for each drafted one, and one more: engine/speculate/rows.py.
rooflab.accepted = (drew, draft) => {
  const wrong = draft.findIndex((token, i) => token !== drew[i]);
  return drew.slice(0, (wrong < 0 ? draft.length : wrong) + 1);
};
rooflab.widget("drafts", ["drafts"], (root, [{ runs, texts }]) => {
  const [shown, status, at] = [rooflab.el("div"), rooflab.status(), { run: 0 }];
  const words = (tokens) => tokens.map((token) => rooflab.quoted(texts[token])).join(" ") || "–";
  const draw = (count) => {
    const steps = runs[at.run].steps.slice(0, count)
      .map((step) => ({ ...step, taken: rooflab.accepted(step.drew, step.draft) }));
    const head = ["step", "new tokens", "accepted", "rejected", "the model's token", "ms"];
    shown.replaceChildren(rooflab.table("Steps; the first is the prefill", head, steps.map(({ ms, draft, taken }, i) =>
      [i + 1, taken.length, ...[taken.slice(0, -1), draft.slice(taken.length - 1), taken.slice(-1)].map(words),
        rooflab.digits(ms)])));
    const decodes = steps.slice(1);
    const drawn = decodes.reduce((sum, step) => sum + step.taken.length, 0);
    const tokens = Math.min(drawn, runs[at.run].answer.length - 1); // what comes behind the end is dropped
    const [plain, drafted] = [false, true].map((has) => decodes.filter(({ draft }) => has === draft.length > 0)
      .map((step) => step.ms).sort((a, b) => a - b)).map((own) => own.length ? rooflab.ms(own[own.length >> 1]) : "–");
    status.textContent = `${tokens} tokens in ${decodes.length} decode steps. Median step without a draft: ${plain}, `
      + `with a draft: ${drafted}.`;
  };
  const [all, names] = [() => runs[at.run].steps.length, runs.map(({ name }, i) => [i, name])];
  root.append(...rooflab.choices(at, () => draw(all()), [["run", "an answer that", names]]), rooflab.steps(all, draw),
    status, shown);
  draw(0);
});
