rooflab.widget("residual", ["run", "inside"], (root, [run, { residual }]) => {
  const { digits } = rooflab;
  const shown = rooflab.el("div");
  const show = (token) => {
    const norms = residual.map((row) => row[token]); // the embedding, then after each attention and each MLP
    const name = rooflab.quoted(run.prompt[token][1]);
    const rows = norms.slice(1).flatMap((norm, i) => (i % 2 ? [] : [[i / 2, digits(norm), digits(norms[i + 2])]]));
    shown.replaceChildren(
      rooflab.lines(`Norm of the residual of ${name} through the layers`,
        [{ label: name, points: norms.map((norm, i) => [i / 2, norm]) }], { x: "layers computed", y: "norm" }),
      rooflab.table(`${name}: norm ${digits(norms[0])} as embedding`, ["layer", "after attention", "after MLP"], rows));
  };
  const last = run.prompt.length - 1;
  const options = run.prompt.map(([, name], i) => [i, `${i}: ${rooflab.quoted(name)}`]);
  root.append(rooflab.choice("Token", options, last, (value) => show(Number(value))), shown);
  show(last);
});
