rooflab.widget("neighbours", ["neighbours"], (root, [{ tokens }]) => {
  const shown = rooflab.el("div");
  const show = (id) => {
    const [, name, near] = tokens.find((one) => String(one[0]) === id);
    shown.replaceChildren(rooflab.bars(`The tokens nearest to ${name}`, near.map(([other, cosine]) =>
      ({ label: rooflab.quoted(other), value: cosine, text: rooflab.digits(cosine) })), { max: 1 }));
  };
  const options = tokens.map(([id, name]) => [id, rooflab.quoted(name)]);
  const first = String(tokens.find((one) => one[1] === " France")[0]);
  root.append(rooflab.choice("Token", options, first, show), shown);
  show(first);
});
