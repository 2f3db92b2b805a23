// The angle of a pair at a position, and the vector x after all its pairs turned: pair i is x[i] and x[i + size / 2].
rooflab.ropeAngle = (position, pair, { theta, size }) => position * theta ** ((-2 * pair) / size);
rooflab.rotated = (x, position, rope) => x.map((_, i) => {
  const [half, pair] = [rope.size / 2, i % (rope.size / 2)];
  const angle = rooflab.ropeAngle(position, pair, rope);
  return i < half ? x[pair] * Math.cos(angle) - x[pair + half] * Math.sin(angle)
    : x[pair + half] * Math.cos(angle) + x[pair] * Math.sin(angle);
});
rooflab.score = (query, key, at, distance, rope) => {
  const [q, k] = [rooflab.rotated(query, at + distance, rope), rooflab.rotated(key, at, rope)];
  return q.reduce((sum, value, i) => sum + value * k[i], 0) / Math.sqrt(rope.size);
};

rooflab.widget("rope", ["inside"], (root, [{ query, key, rope }]) => {
  const { svg, digits } = rooflab;
  const [pairs, columns] = [rope.size / 2, rooflab.wide() < 640 ? 8 : 16];
  const controls = [["position", "Position", { min: 0, max: 200 }], ["pair", "Pair", { min: 0, max: pairs - 1 }]];
  rooflab.panel(root, { position: 7, pair: 0 }, controls, (now) => {
    const dials = [...Array(pairs).keys()].flatMap((pair) => {
      const [x, y] = [pair % columns, Math.floor(pair / columns)].map((place) => 20 + 40 * place);
      const angle = rooflab.ropeAngle(now.position, pair, rope);
      const end = { x2: x + 15 * Math.cos(angle), y2: y - 15 * Math.sin(angle) };
      const [stroke, width] = pair === now.pair ? ["var(--link)", 4] : ["var(--line)", 1];
      return [svg("circle", { cx: x, cy: y, r: 16, fill: "none", stroke, "stroke-width": width }),
        svg("line", { x1: x, y1: y, ...end, stroke: "var(--read)", "stroke-width": 3 })];
    });
    const turns = rooflab.ropeAngle(now.position, now.pair, rope) / (2 * Math.PI);
    const rows = [0, now.position, now.position + 1000].map((at) =>
      [`position ${at}`, ...[7, 30].map((distance) => digits(rooflab.score(query, key, at, distance, rope)))]);
    return [`Pair ${now.pair} at position ${now.position}: ${digits(360 * turns)}°, ${digits(turns)} turns`,
      rooflab.drawing("The angles of all pairs", 40 * columns, (40 * pairs) / columns, ...dials),
      rooflab.table("Score of a query and a key of the run", ["key at", "query 7 later", "query 30 later"], rows)];
  });
});
