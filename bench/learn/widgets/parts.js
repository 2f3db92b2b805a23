// FLOPs of one token: 2 for each parameter of a matrix that multiplies it. An embedding multiplies only as the LM head.
rooflab.flopsPerToken = ({ parameters: { embedding, attention, mlp, lm_head }, tie_word_embeddings }) =>
  2 * (attention + mlp + (tie_word_embeddings ? embedding : lm_head));

rooflab.widget("parts", ["models"], (root, [{ models }]) => {
  const shown = rooflab.el("div");
  const show = (name) => {
    const { parameters, tie_word_embeddings: tied, num_layers } = models[name];
    const labels = { mlp: "MLP", norms: "RMSNorm", lm_head: tied ? "LM head: uses the embedding" : "LM head" };
    const parts = Object.entries(parameters).map(([part, value]) =>
      ({ label: labels[part] ?? part, value, text: `${rooflab.digits(value / 1e6)} M` }));
    const total = parts.reduce((sum, part) => sum + part.value, 0);
    shown.replaceChildren(rooflab.bars(`Parameters of ${name}`, parts), rooflab.table(name, ["what", "number"], [
      ["layers", num_layers], ["parameters", total.toLocaleString("en-US")],
      ["FLOPs a token", `${rooflab.digits(rooflab.flopsPerToken(models[name]) / 1e9)} G`],
      ["bytes in bf16", rooflab.bytes(2 * total)]]));
  };
  root.append(rooflab.choice("Model", Object.keys(models), "smollm2-135m", show), shown);
  show("smollm2-135m");
});
