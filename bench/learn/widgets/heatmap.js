// The weight of one query and key, 0 to 1: the record holds thousandths by layer, head, query, and key up to the query.
rooflab.weight = ({ tokens, thousandths }, layer, head, query, key) => {
  const [heads, cells] = [9, (tokens.length * (tokens.length + 1)) / 2];
  return thousandths[(layer * heads + head) * cells + (query * (query + 1)) / 2 + key] / 1000;
};

rooflab.widget("heatmap", ["attention"], (root, [{ texts }]) => {
  const [now, shown] = [{ text: 0, layer: 0, head: 0 }, rooflab.el("div")];
  const set = (name) => (value) => { now[name] = Number(value); show(); };
  const show = () => {
    const one = texts[now.text];
    const cell = (query, key) => {
      const share = 100 * rooflab.weight(one, now.layer, now.head, query, key);
      const colour = `color-mix(in srgb, var(--read) ${0.5 * share}%, var(--page))`;
      return rooflab.el("span", { class: "cell", style: `background: ${colour}`, text: Math.round(share) });
    };
    const rows = one.tokens.map((name, query) => [`${query} ${name}`,
      ...one.tokens.map((_, key) => (key <= query ? cell(query, key) : ""))]);
    shown.replaceChildren(rooflab.table(`Layer ${now.layer}, head ${now.head}: % that a row's token looks at a column's`,
      ["", ...one.tokens.map((name, key) => `${key} ${name}`)], rows));
  };
  root.append(
    rooflab.choice("Text", texts.map((one, i) => [i, one.tokens.join("")]), 0, set("text")),
    rooflab.range("Layer", { min: 0, max: 29, value: 0 }, set("layer")),
    rooflab.range("Head", { min: 0, max: 8, value: 0 }, set("head")), shown);
  show();
});
