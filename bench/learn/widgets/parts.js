// FLOPs of one token: 2 for each parameter of a matrix that multiplies it. An embedding multiplies only as the LM head.
rooflab.flopsPerToken = ({ parameters: { embedding, attention, mlp, lm_head }, tie_word_embeddings }) =>
  2 * (attention + mlp + (tie_word_embeddings ? embedding : lm_head));

rooflab.widget("parts", ["models"], (root, [{ models }]) => {
  rooflab.panel(root, { name: "smollm2-135m" }, [["name", "Model", Object.keys(models)]], ({ name }) => {
    const { parameters, tie_word_embeddings: tied, num_layers } = models[name];
    const labels = { mlp: "MLP", norms: "RMSNorm", lm_head: tied ? "LM head: uses the embedding" : "LM head" };
    const parts = Object.entries(parameters).map(([part, value]) => [labels[part] ?? part, value]);
    const total = rooflab.sum(Object.values(parameters));
    return ["", rooflab.bars(`Parameters of ${name}`, parts, (n) => `${rooflab.digits(n / 1e6)} M`),
      rooflab.table(name, ["what", "number"], [["layers", num_layers], ["parameters", total.toLocaleString("en-US")],
        ["FLOPs a token", `${rooflab.digits(rooflab.flopsPerToken(models[name]) / 1e9)} G`],
        ["bytes in bf16", rooflab.bytes(2 * total)]])];
  });
});
