rooflab.widget("one_head", ["run", "inside"], (root, [run, { weights }]) => {
  const { percent } = rooflab;
  const names = run.prompt.map((one) => rooflab.quoted(one[1]));
  const state = { query: names.length - 1 };
  const tokens = (show) => rooflab.chips(names.map((name) => [name, ""]), (i) => { state.query = i; show(); });
  rooflab.panel(root, state, [tokens], ({ query }) => {
    const row = weights[query];
    root.querySelectorAll(".chips button").forEach((button, key) => {
      button.setAttribute("aria-pressed", String(key === query));
      button.lastChild.textContent = key <= query ? percent(row[key]) : "later";
    });
    const most = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 6);
    const bars = most.map((key) => [`${names[key]}, number ${key}`, row[key]]);
    bars.push(["all others", Math.max(0, 1 - rooflab.sum(bars.map((bar) => bar[1])))]);
    return [`${names[query]}, number ${query}, looks at:`,
      rooflab.bars("The tokens that it looks at most", bars, percent, 1)];
  });
});
