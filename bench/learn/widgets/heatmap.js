// The weight of a query and a key, from 0 to 1. The record has it by layer, head, query, and key up to the query.
rooflab.weight = ({ tokens: { length }, thousandths }, layer, head, query, key) =>
  thousandths[((layer * 9 + head) * length * (length + 1) + query * (query + 1)) / 2 + key] / 1000;

rooflab.widget("heatmap", ["attention"], (root, [{ texts }]) => {
  const controls = [["text", "Text", texts.map((one, i) => [i, one.tokens.join("")])],
    ["layer", "Layer", { min: 0, max: 29 }], ["head", "Head", { min: 0, max: 8 }]];
  rooflab.panel(root, { text: 0, layer: 16, head: 0 }, controls, ({ text, layer, head }) => {
    const names = texts[text].tokens.map((name, i) => `${rooflab.quoted(name)} ${i}`);
    const cell = (query, key) => (100 * rooflab.weight(texts[text], layer, head, query, key)).toFixed(1);
    const rows = names.map((name, query) => [name, ...names.map((_, key) => (key <= query ? cell(query, key) : ""))]);
    const table = rooflab.table(`Layer ${layer}, head ${head}: % of each row's weight`, ["token", ...names], rows);
    table.style.whiteSpace = "nowrap";
    for (const one of table.querySelectorAll("td")) {
      one.style.background = `color-mix(in srgb, var(--read) ${one.textContent / 2}%, var(--page))`;
    }
    return ["", table];
  });
});
