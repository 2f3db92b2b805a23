// The angle by which RoPE turns a pair of numbers at a position, and the vector x after it: pair i is x[i] and x[i + D/2].
rooflab.ropeAngle = (position, pair, { theta, size }) => position * theta ** ((-2 * pair) / size);
rooflab.rotated = (x, position, rope) => x.map((_, i) => {
  const [half, pair] = [rope.size / 2, i % (rope.size / 2)];
  const angle = rooflab.ropeAngle(position, pair, rope);
  return x[pair] * (i < half ? Math.cos(angle) : Math.sin(angle)) + x[pair + half] * (i < half ? -Math.sin(angle) : Math.cos(angle));
});

rooflab.widget("rope", ["inside"], (root, [{ query, key, rope }]) => {
  const { el, svg, digits, rotated } = rooflab;
  const [now, shown, said] = [{ position: 7, pair: 0 }, el("div"), rooflab.status()];
  const set = (name) => (value) => { now[name] = value; show(); };
  const dial = (pair) => {
    const [x, y] = [20 + 40 * (pair % 16), 20 + 40 * Math.floor(pair / 16)];
    const angle = rooflab.ropeAngle(now.position, pair, rope);
    const chosen = pair === now.pair;
    return svg("g", {}, svg("circle", { cx: x, cy: y, r: 16, fill: chosen ? "var(--bar)" : "none",
      stroke: chosen ? "var(--link)" : "var(--line)", "stroke-width": chosen ? 3 : 1 }),
    svg("line", { x1: x, y1: y, x2: x + 15 * Math.cos(angle), y2: y - 15 * Math.sin(angle),
      stroke: "var(--read)", "stroke-width": 3 }));
  };
  const score = (distance, at) => {
    const [q, k] = [rotated(query, at + distance, rope), rotated(key, at, rope)];
    return digits(q.reduce((sum, value, i) => sum + value * k[i], 0) / Math.sqrt(rope.size));
  };
  const show = () => {
    const turns = rooflab.ropeAngle(now.position, now.pair, rope) / (2 * Math.PI);
    said.textContent = `Pair ${now.pair} at position ${now.position}: ${digits(360 * turns)}°, ${digits(turns)} turns`;
    const starts = [0, now.position, 1000 + now.position];
    shown.replaceChildren(
      svg("svg", { viewBox: "0 0 640 80", role: "img", "aria-label": "The angles of all 32 pairs" },
        ...Array.from({ length: rope.size / 2 }, (_, pair) => dial(pair))),
      rooflab.table("Score of one query and one key of the run", ["key at", "query 7 later", "query 30 later"],
        starts.map((at) => [`position ${at}`, score(7, at), score(30, at)])));
  };
  root.append(rooflab.range("Position", { min: 0, max: 200, value: 7 }, set("position")),
    rooflab.range("Pair", { min: 0, max: rope.size / 2 - 1, value: 0 }, set("pair")), said, shown);
  show();
});
