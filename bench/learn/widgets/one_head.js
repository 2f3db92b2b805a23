rooflab.widget("one_head", ["run", "inside"], (root, [run, { weights }]) => {
  const { el, quoted, percent } = rooflab;
  const [shown, said, names] = [el("div"), rooflab.status(), run.prompt.map((one) => quoted(one[1]))];
  const small = names.map(() => el("small"));
  const show = (query) => {
    const row = weights[query];
    small.forEach((node, key) => (node.textContent = key <= query ? percent(row[key]) : "later"));
    buttons.forEach((one, i) => one.setAttribute("aria-pressed", String(i === query)));
    const bar = (label, value) => ({ label, value, text: percent(value) });
    const most = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 6);
    const bars = most.map((key) => bar(`${names[key]}, number ${key}`, row[key]));
    bars.push(bar("all others", Math.max(0, 1 - bars.reduce((sum, one) => sum + one.value, 0))));
    shown.replaceChildren(rooflab.bars("The tokens that it looks at most", bars, { max: 1 }));
    said.textContent = `${names[query]}, number ${query}, looks at:`;
  };
  const buttons = names.map((name, i) => rooflab.button(name, () => show(i)));
  buttons.forEach((one, i) => one.append(small[i]));
  root.append(el("div", { class: "chips" }, ...buttons), said, shown);
  show(names.length - 1);
});
