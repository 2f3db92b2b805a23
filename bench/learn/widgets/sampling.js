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
  const [logits, count] = [rooflab.logits(record), (n) => n.toLocaleString("en-US")];
  const slider = (name, label, step, max, off) =>
    [name, label, { min: off === 1 ? step : 0, max, step, show: (x) => (x === off ? "off" : rooflab.digits(x)) }];
  const controls = [slider("temperature", "Temperature", 0.05, 2), slider("top_k", "top-k", 1, 50, 0),
    slider("top_p", "top-p", 0.05, 1, 1), slider("min_p", "min-p", 0.01, 0.5, 0)];
  rooflab.panel(root, { temperature: 1, top_k: 0, top_p: 1, min_p: 0 }, controls, (now) => {
    const kept = rooflab.distribution(logits, now);
    const bars = kept.slice(0, 8).map(([id, p]) => [rooflab.quoted(rooflab.tokenName(vocabulary, id)), p]);
    bars.push(["all others", rooflab.sum(kept.slice(8).map((one) => one[1]))]);
    return [`${count(kept.length)} of ${count(logits.length)} tokens may be drawn`,
      rooflab.bars("Tokens that may be drawn", bars, rooflab.percent, 1)];
  });
});
