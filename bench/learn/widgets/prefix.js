// Which pages of a second prompt are in the cache already, by the rules of `rooflab.Pages`.
rooflab.widget("prefix", ["prefix"], (root, [{ first, seconds, page_tokens: size, cut_ms, whole_ms }]) => {
  const state = { second: seconds[0] };
  const [names, max] = [seconds.map(({ name }, i) => [i, name]), first.ids.length];
  const cut = (n) => ({ ids: first.ids.map((id, i) => (i < n ? id : -1)), ttft_without_ms: whole_ms,
    texts: first.texts.map((text, i) => (i < n ? text : " ▯")), ttft_with_ms: cut_ms[Math.floor(n / size)] });
  const set = (show, second) => { state.second = second; show(); };
  const controls = [(show) => rooflab.choice("second prompt", names, 0, (i) => set(show, seconds[i])), (show) =>
    rooflab.range("or: tokens that it shares with the first", { min: 0, max, value: max }, (n) => set(show, cut(n)))];
  rooflab.panel(root, state, controls, ({ second: { ids, texts, ttft_with_ms, ttft_without_ms } }) => {
    const pages = new rooflab.Pages(64, size);
    const [one, two] = [first.ids, ids].map((tokens) => ({ tokens, pages: [], contents: [] }));
    pages.grow(one, one.tokens.length);
    pages.publish(one, one.tokens.length);
    pages.reuse(two);
    const boxes = [...Array(Math.ceil(ids.length / size)).keys()].map((i) => [
      texts.slice(i * size, (i + 1) * size).join(""), i in two.pages ? `page ${two.pages[i]}, shared` : "computed"]);
    return [`Shared pages: ${two.pages.length}. Not computed again: ${two.computed} of ${ids.length} tokens.`,
      rooflab.chips(boxes),
      rooflab.bars("TTFT", [["with the prefix cache", ttft_with_ms], ["without", ttft_without_ms]], rooflab.ms)];
  });
});
