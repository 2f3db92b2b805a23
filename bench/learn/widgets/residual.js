rooflab.widget("residual", ["run", "inside"], (root, [run, { residual }]) => {
  const { el, digits } = rooflab;
  const names = run.prompt.map((one) => rooflab.quoted(one[1]));
  const options = names.map((name, i) => [i, `${i}: ${name}`]);
  rooflab.panel(root, { token: names.length - 1 }, [["token", "Token", options]], ({ token }) => {
    const norms = residual.map((row) => row[token]); // of the embedding, then after each attention and each MLP
    const rows = norms.slice(1).flatMap((norm, i) => (i % 2 ? [] : [[i / 2, digits(norm), digits(norms[i + 2])]]));
    const series = [[names[token].slice(0, 12), norms.map((norm, i) => [i / 2, norm])]];
    const caption = `${names[token]}: norm ${digits(norms[0])} as embedding, ${digits(norms[60])} after the last layer`;
    return ["", rooflab.lines(caption, series, { x: "layers computed", y: "norm" }),
      el("details", {}, el("summary", { text: "The numbers" }),
        rooflab.table(caption, ["layer", "after attention", "after MLP"], rows))];
  });
});
