rooflab.widget("neighbours", ["neighbours"], (root, [{ tokens }]) => {
  const options = tokens.map(([id, name]) => [id, rooflab.quoted(name)]);
  const [token] = tokens.find((one) => one[1] === " France");
  rooflab.panel(root, { token }, [["token", "Token", options]], (state) => {
    const [, name, near] = tokens.find((one) => one[0] === state.token);
    const rows = near.map(([other, cosine]) => [rooflab.quoted(other), cosine]);
    return ["", rooflab.bars(`The tokens nearest to ${name}`, rows, rooflab.digits, 1)];
  });
});
