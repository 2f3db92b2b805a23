// FLOPs of one token: 2 for each parameter of a matrix that multiplies it. The embedding only multiplies as a tied head.
rooflab.flopsPerToken = ({ parameters: { embedding, attention, mlp, lm_head }, tie_word_embeddings }) =>
  2 * (attention + mlp + (tie_word_embeddings ? embedding : lm_head));

rooflab.widget("parts", ["models"], (root, [{ models }]) => {
  const { digits } = rooflab;
  const [shown, names] = [rooflab.el("div"), { embedding: "embedding", attention: "attention", mlp: "MLP", norms: "norms" }];
  const millions = (n) => `${digits(n / 1e6)} M`;
  const show = (name) => {
    const model = models[name];
    const head = model.tie_word_embeddings ? "head (the embedding's weights)" : "head";
    const parts = Object.entries({ ...names, lm_head: head }).map(([key, label]) => [label, model.parameters[key]]);
    const total = parts.reduce((sum, part) => sum + part[1], 0);
    shown.replaceChildren(
      rooflab.bars(`Parameters of ${name}`, parts.map(([label, value]) => ({ label, value, text: millions(value) }))),
      rooflab.table(name, ["what", "number"], [
        ["layers", model.num_layers], ["parameters", total.toLocaleString("en-US")],
        ["FLOPs a token", `${digits(rooflab.flopsPerToken(model) / 1e9)} G`],
        ["bytes in bf16, 2 a parameter", rooflab.bytes(2 * total)]]));
  };
  root.append(rooflab.choice("Model", Object.keys(models), "smollm2-135m", show), shown);
  show("smollm2-135m");
});
