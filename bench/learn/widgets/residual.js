rooflab.widget("residual", ["run", "inside"], (root, [run, { residual }]) => {
  const { el, digits } = rooflab;
  const [shown, names] = [el("div"), run.prompt.map((one) => rooflab.quoted(one[1]))];
  const show = (token) => {
    const norms = residual.map((row) => row[token]); // of the embedding, then after each attention and each MLP
    const rows = norms.slice(1).flatMap((norm, i) => (i % 2 ? [] : [[i / 2, digits(norm), digits(norms[i + 2])]]));
    const caption = `${names[token]}: norm ${digits(norms[0])} as embedding, ${digits(norms[60])} after the last layer`;
    const series = [{ label: names[token].slice(0, 12), points: norms.map((norm, i) => [i / 2, norm]) }];
    shown.replaceChildren(rooflab.lines(caption, series, { x: "layers computed", y: "norm" }),
      el("details", {}, el("summary", { text: "The numbers" }),
        rooflab.table(caption, ["layer", "after attention", "after MLP"], rows)));
  };
  const [last, options] = [names.length - 1, names.map((name, i) => [i, `${i}: ${name}`])];
  root.append(rooflab.choice("Token", options, last, (value) => show(Number(value))), shown);
  show(last);
});
