// The memory that a model takes on each GPU, by the formulas of roofline/llm.py.
const ITEM = { fp32: 4, bf16: 2, fp16: 2, fp8_e4m3: 1, int8: 1 };
rooflab.plainBytes = (dtype) => Math.max(2, ITEM[dtype]); // of activations, embedding, norms and head
rooflab.gpuCounts = ({ num_heads: heads, num_kv_heads: kv }) =>
  [1, 2, 3, 4, 5, 6, 7, 8].filter((n) => heads % n === 0 && (kv % n === 0 || n % kv === 0));
rooflab.kvBytes = (model, dtype, gpus = 1, layers = model.num_layers) =>
  2 * layers * Math.max(1, Math.floor(model.num_kv_heads / gpus)) * model.head_dim * ITEM[dtype];
// A stage of a pipeline has some `layers`; the first stage has the embedding, and the last has the output head.
rooflab.weightBytes = (model, dtype, gpus = 1, { layers = model.num_layers, first = true, last = true } = {}) => {
  const [{ embedding, attention, mlp, lm_head }, plain] = [model.parameters, rooflab.plainBytes(dtype)];
  const [inputs, copied] = [model.hidden_size + model.attention_bias, Math.max(0, gpus - model.num_kv_heads)];
  const head = model.tie_word_embeddings && !first ? embedding : lm_head;
  const ends = (first ? embedding : 0) + (last ? head : 0);
  const layer = (attention + mlp) / model.num_layers + 2 * copied * model.head_dim * inputs;
  const norms = 2 * layers * (model.hidden_size + model.qk_norm * model.head_dim) + last * model.hidden_size;
  return Math.ceil((layers * layer * ITEM[dtype] + ends * plain) / gpus) + norms * plain;
};
rooflab.estimate = (model, gpu, { batch, context, dtype = "bf16", kv_dtype = "bf16", gpus = 1 }) => {
  const heads = model.num_heads / gpus + Math.max(1, Math.floor(model.num_kv_heads / gpus));
  const widest = Math.max(2 * heads * model.head_dim, 3 * Math.ceil(model.intermediate_size / gpus));
  const [row, tokens] = [(2 * model.hidden_size + widest) * rooflab.plainBytes(dtype), Math.min(context, 8192)];
  const logits = Math.ceil(model.vocab_size / gpus) * 4;
  const [weight_bytes, token_bytes] = [rooflab.weightBytes(model, dtype, gpus), rooflab.kvBytes(model, kv_dtype, gpus)];
  const [kv_bytes, activation_bytes] = [batch * context * token_bytes, Math.max(batch, tokens) * row + batch * logits];
  const usable = gpu.hbm_bytes * 0.9;
  const most = (fixed, each) => Math.max(0, Math.floor((usable - weight_bytes - fixed) / each));
  const each = context * token_bytes + logits;
  const few = most(tokens * row, each);
  const [max_sequences, used] = [few > tokens ? most(0, each + row) : few, weight_bytes + kv_bytes + activation_bytes];
  return { weight_bytes, kv_bytes_per_token: token_bytes, kv_bytes, activation_bytes, usable, max_sequences,
    fits: used <= usable };
};

rooflab.widget("estimator", ["models", "gpus"], (root, [{ models }, { gpus }]) => {
  const power = { min: 0, max: 10, show: (i) => (2 ** i).toLocaleString("en-US") }; // a slider of powers of 2
  const controls = [["model", "model", Object.keys(models)],
    ["gpu", "GPU", Object.entries(gpus).map(([name, gpu]) => [name, gpu.full_name])], ["gpus", "GPUs", [1, 2, 4, 8]],
    ["dtype", "dtype of the weights", Object.keys(ITEM)], ["kv_dtype", "dtype of the KV cache", ["bf16", "fp8_e4m3"]],
    ["sequences", "sequences in the batch", power], ["tokens", "context, tokens", { ...power, max: 17 }]];
  const state = { model: "llama-3.1-8b", gpu: "h100-sxm", sequences: 4, tokens: 12, dtype: "bf16", kv_dtype: "bf16" };
  rooflab.panel(root, { ...state, gpus: 1 }, controls, (at) => {
    const [model, gpu, batch, context] = [models[at.model], gpus[at.gpu], 2 ** at.sequences, 2 ** at.tokens];
    if (!rooflab.gpuCounts(model).includes(at.gpus)) {
      return [`The heads of ${model.name} cannot be split over ${at.gpus} GPUs.`];
    }
    if (context > model.max_position) return [`${model.name} takes at most ${model.max_position} tokens.`];
    const found = rooflab.estimate(model, gpu, { ...at, batch, context });
    const parts = [["weights", found.weight_bytes, "var(--read)"], ["KV cache", found.kv_bytes, "var(--write)"],
      ["activations", found.activation_bytes, "var(--good)"]];
    parts.push(["free", Math.max(0, found.usable - rooflab.sum(parts.map((part) => part[1]))), "var(--line)"]);
    const stack = parts.map(([, value, colour]) => rooflab.el("span",
      { style: `flex: 0 0 ${(100 * value) / gpu.hbm_bytes}%; background: ${colour}` }));
    return [`${found.fits ? "It fits." : "It does not fit."} KV cache per token: `
      + `${rooflab.bytes(found.kv_bytes_per_token)}. Sequences of this context that fit: ${found.max_sequences}.`,
    rooflab.el("div", { class: "stack", "aria-hidden": "true" }, ...stack),
    rooflab.bars(`Memory of each GPU: ${rooflab.bytes(gpu.hbm_bytes)}`, parts, rooflab.bytes, gpu.hbm_bytes)];
  });
});
