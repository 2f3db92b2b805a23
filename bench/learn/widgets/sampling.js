rooflab.logits = ({ largest, below }) => below.map((steps) => largest - steps / 256);

// The tokens that may be drawn, as [id, probability], the likeliest first. 0 turns top-k and min-p off, and 1 top-p.
rooflab.distribution = (logits, { temperature, top_k, top_p, min_p }) => {
  const order = Uint32Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
  if (temperature === 0) return [[order[0], 1]];
  const score = (id) => logits[id] / temperature;
  const ids = [...order.subarray(0, top_k || order.length)];
  const weights = ids.map((id) => Math.exp(score(id) - score(ids[0])));
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const all = sum(weights);
  let [count, before] = [0, 0];
  while (count < ids.length && (top_p === 1 || before < top_p) && weights[count] >= min_p) before += weights[count++] / all;
  const kept = sum(weights.slice(0, count));
  return ids.slice(0, count).map((id, i) => [id, weights[i] / kept]);
};

rooflab.widget("sampling", ["logits", "vocabulary"], (root, [record, vocabulary]) => {
  const { range, digits, share } = rooflab;
  const [logits, shown, said] = [rooflab.logits(record), rooflab.el("div"), rooflab.status()];
  const now = { temperature: 1, top_k: 0, top_p: 1, min_p: 0 };
  const set = (name) => (value) => { now[name] = value; show(); };
  const show = () => {
    const kept = rooflab.distribution(logits, now);
    const bars = kept.slice(0, 8).map(([id, p]) =>
      ({ label: rooflab.quoted(rooflab.tokenName(vocabulary, id)), value: p, text: share(p) }));
    const rest = kept.slice(8).reduce((sum, one) => sum + one[1], 0);
    if (kept.length > 8) bars.push({ label: `the other ${(kept.length - 8).toLocaleString("en-US")}`, value: rest, text: share(rest) });
    shown.replaceChildren(rooflab.bars("Tokens that may be drawn", bars, { max: 1 }));
    said.textContent = `${kept.length.toLocaleString("en-US")} of ${logits.length.toLocaleString("en-US")} tokens may be drawn`;
  };
  const off = (value) => (x) => (x === value ? "off" : digits(x));
  root.append(
    range("Temperature", { min: 0, max: 2, step: 0.05, value: 1, show: (x) => (x ? digits(x) : "0: the likeliest") }, set("temperature")),
    range("top-k", { min: 0, max: 50, value: 0, show: off(0) }, set("top_k")),
    range("top-p", { min: 0.05, max: 1, step: 0.05, value: 1, show: off(1) }, set("top_p")),
    range("min-p", { min: 0, max: 0.5, step: 0.01, value: 0, show: off(0) }, set("min_p")), said, shown);
  show();
});
