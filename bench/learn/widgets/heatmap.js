// The weight of a query and a key, from 0 to 1. The record has it by layer, head, query, and key up to the query.
rooflab.weight = ({ tokens: { length }, thousandths }, layer, head, query, key) =>
  thousandths[((layer * 9 + head) * length * (length + 1) + query * (query + 1)) / 2 + key] / 1000;

rooflab.widget("heatmap", ["attention"], (root, [{ texts }]) => {
  const [now, shown] = [{ text: 0, layer: 16, head: 0 }, rooflab.el("div", { style: "white-space: nowrap" })];
  const show = () => {
    const names = texts[now.text].tokens.map((name, i) => `${rooflab.quoted(name)} ${i}`);
    const cell = (query, key) => (100 * rooflab.weight(texts[now.text], now.layer, now.head, query, key)).toFixed(1);
    const rows = names.map((name, query) => [name, ...names.map((_, key) => (key <= query ? cell(query, key) : ""))]);
    const table = rooflab.table(`Layer ${now.layer}, head ${now.head}: % of each row's weight`, ["token", ...names], rows);
    for (const one of table.querySelectorAll("td")) {
      one.style.background = `color-mix(in srgb, var(--read) ${one.textContent / 2}%, var(--page))`;
    }
    shown.replaceChildren(table);
  };
  const set = (name) => (value) => { now[name] = Number(value); show(); };
  root.append(
    rooflab.choice("Text", texts.map((one, i) => [i, one.tokens.join("")]), 0, set("text")),
    rooflab.range("Layer", { min: 0, max: 29, value: now.layer }, set("layer")),
    rooflab.range("Head", { min: 0, max: 8, value: now.head }, set("head")), shown);
  show();
});
