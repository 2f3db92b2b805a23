rooflab.widget("one_head", ["run", "inside"], (root, [run, { weights }]) => {
  const { el, quoted, share } = rooflab;
  const [shown, said] = [el("div"), rooflab.status()];
  const small = run.prompt.map(() => el("small"));
  const show = (query) => {
    const row = weights[query];
    small.forEach((node, key) => (node.textContent = key <= query ? share(row[key]) : "later"));
    buttons.forEach((one, i) => one.setAttribute("aria-pressed", String(i === query)));
    const order = row.map((weight, key) => [key, weight]).sort((a, b) => b[1] - a[1]);
    const rest = order.slice(6).reduce((sum, one) => sum + one[1], 0);
    const bars = order.slice(0, 6).map(([key, weight]) =>
      ({ label: `${key}: ${quoted(run.prompt[key][1])}`, value: weight, text: share(weight) }));
    if (order.length > 6) bars.push({ label: `the other ${order.length - 6}`, value: rest, text: share(rest) });
    shown.replaceChildren(rooflab.bars("The tokens that it looks at most", bars, { max: 1 }));
    said.textContent = `Token ${query}, ${quoted(run.prompt[query][1])}, looks at ${row.length} tokens`;
  };
  const buttons = run.prompt.map(([, name], i) =>
    el("button", { type: "button", on: { click: () => show(i) } }, quoted(name), small[i]));
  root.append(el("div", { class: "chips" }, ...buttons), said, shown);
  show(run.prompt.length - 1);
});
