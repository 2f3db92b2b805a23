// A recorded run with drafts.  The model draws a token for each drafted one, and one more: engine/speculate/rows.py.
rooflab.accepted = (drew, draft) => {
  const wrong = draft.findIndex((token, i) => token !== drew[i]);
  return drew.slice(0, (wrong < 0 ? draft.length : wrong) + 1);
};
rooflab.widget("drafts", ["drafts"], (root, [{ runs, texts }]) => {
  const words = (tokens) => tokens.map((token) => rooflab.quoted(texts[token])).join(" ") || "–";
  const state = { run: 0, count: 0 };
  const controls = [["run", "an answer that", runs.map(({ name }, i) => [i, name])],
    rooflab.steps(state, () => runs[state.run].steps.length)];
  rooflab.panel(root, state, controls, ({ run, count }) => {
    const steps = runs[run].steps.slice(0, count)
      .map((step) => ({ ...step, taken: rooflab.accepted(step.drew, step.draft) }));
    const decodes = steps.slice(1);
    const drawn = rooflab.sum(decodes.map((step) => step.taken.length));
    const tokens = Math.min(drawn, runs[run].answer.length - 1); // what comes behind the end is dropped
    const [plain, drafted] = [false, true].map((has) =>
      decodes.filter(({ draft }) => has === draft.length > 0).map((step) => step.ms))
      .map((own) => (own.length ? rooflab.ms(rooflab.median(own)) : "–"));
    const head = ["step", "new tokens", "accepted", "rejected", "the model's token", "ms"];
    return [`${tokens} tokens in ${decodes.length} decode steps. Median step without a draft: ${plain}, `
      + `with a draft: ${drafted}.`,
    rooflab.table("Steps; the first is the prefill", head, steps.map(({ ms, draft, taken }, i) =>
      [i + 1, taken.length, ...[taken.slice(0, -1), draft.slice(taken.length - 1), taken.slice(-1)].map(words),
        rooflab.digits(ms)]))];
  });
});
