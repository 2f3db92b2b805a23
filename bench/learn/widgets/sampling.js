rooflab.logits = ({ largest, below }) => below.map((steps) => largest - steps / 256);

// The tokens that may be drawn, as [id, probability], the likeliest first. 0 turns top-k and min-p off, and 1 top-p.
rooflab.distribution = (logits, { temperature, top_k, top_p, min_p }) => {
  const order = Uint32Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
  if (temperature === 0) return [[order[0], 1]];
  const ids = [...order.subarray(0, top_k || order.length)];
  const weights = ids.map((id) => Math.exp(logits[id] / temperature - logits[ids[0]] / temperature));
  const all = weights.reduce((a, b) => a + b);
  let [count, before, kept] = [0, 0, 0];
  while (count < ids.length && (top_p === 1 || before < top_p) && weights[count] >= min_p) {
    kept += weights[count];
    before += weights[count++] / all;
  }
  return ids.slice(0, count).map((id, i) => [id, weights[i] / kept]);
};

rooflab.widget("sampling", ["logits", "vocabulary"], (root, [record, vocabulary]) => {
  const { digits, percent } = rooflab;
  const [logits, shown, said] = [rooflab.logits(record), rooflab.el("div"), rooflab.status()];
  const [now, count] = [{ temperature: 1, top_k: 0, top_p: 1, min_p: 0 }, (n) => n.toLocaleString("en-US")];
  const show = () => {
    const kept = rooflab.distribution(logits, now);
    const name = (id) => rooflab.quoted(rooflab.tokenName(vocabulary, id));
    const rest = kept.slice(8).reduce((sum, one) => sum + one[1], 0);
    const bar = (label, value) => ({ label, value, text: percent(value) });
    const bars = [...kept.slice(0, 8).map(([id, p]) => bar(name(id), p)), bar("all others", rest)];
    shown.replaceChildren(rooflab.bars("Tokens that may be drawn", bars, { max: 1 }));
    said.textContent = `${count(kept.length)} of ${count(logits.length)} tokens may be drawn`;
  };
  const slider = (label, name, step, max, off) => rooflab.range(label,
    { min: off === 1 ? step : 0, max, step, value: now[name], show: (x) => (x === off ? "off" : digits(x)) },
    (value) => { now[name] = value; show(); });
  root.append(slider("Temperature", "temperature", 0.05, 2), slider("top-k", "top_k", 1, 50, 0),
    slider("top-p", "top_p", 0.05, 1, 1), slider("min-p", "min_p", 0.01, 0.5, 0), said, shown);
  show();
});
