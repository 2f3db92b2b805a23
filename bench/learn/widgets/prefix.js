// Which pages of a second prompt are in the cache already, by the rules of `rooflab.Pages`.
rooflab.widget("prefix", ["prefix"], (root, [{ first, seconds, page_tokens: size, cut_ms, whole_ms }]) => {
  const [shown, status, at] = [rooflab.el("div"), rooflab.status(), { second: 0 }];
  const draw = (ids, texts, times) => {
    const pages = new rooflab.Pages(64, size);
    const [one, two] = [first.ids, ids].map((tokens) => ({ tokens, pages: [], contents: [] }));
    pages.grow(one, one.tokens.length);
    pages.publish(one, one.tokens.length);
    pages.reuse(two);
    const [shared, count] = [two.pages.length, Math.ceil(ids.length / size)];
    const kind = (i) => rooflab.el("small", { text: i < shared ? `page ${two.pages[i]}, shared` : "computed" });
    const chips = [...Array(count).keys()].map((i) =>
      rooflab.el("span", { text: texts.slice(i * size, (i + 1) * size).join("") }, kind(i)));
    const bars = ["with the prefix cache", "without"].map((label, i) =>
      ({ label, value: times(shared)[i], text: rooflab.ms(times(shared)[i]) }));
    shown.replaceChildren(rooflab.el("div", { class: "chips" }, ...chips), rooflab.bars("TTFT", bars));
    status.textContent = `Shared pages: ${shared}. Not computed again: ${two.computed} of ${ids.length} tokens.`;
  };
  const cut = (n) => draw(first.ids.map((id, i) => (i < n ? id : -1)),
    first.texts.map((text, i) => (i < n ? text : " ▯")), (pages) => [cut_ms[pages], whole_ms]);
  const choose = ({ ids, texts, ttft_with_ms, ttft_without_ms } = seconds[at.second]) =>
    draw(ids, texts, () => [ttft_with_ms, ttft_without_ms]);
  const [names, max] = [seconds.map(({ name }, i) => [i, name]), first.ids.length];
  root.append(...rooflab.choices(at, () => choose(), [["second", "second prompt", names]]),
    rooflab.range("or: tokens that it shares with the first", { min: 0, max, value: max }, cut), shown, status);
  choose();
});
