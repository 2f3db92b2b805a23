// What each GPU holds and sends when a model is split, by the formulas of roofline/llm.py and roofline/steps.py.
rooflab.ranks = (model, gpu, { tensor, stages, rows, dtype = "bf16" }) => {
  const nvlink = tensor <= gpu.nvlink_gpus && gpu.nvlink_bytes_per_s;
  const adds = nvlink && gpu.nvlink_gpus > 2 && gpu.sm >= 9; // its switches add, so that a GPU sends its part once
  const row_bytes = rows * model.hidden_size * rooflab.plainBytes(dtype);
  const factor = tensor === 1 ? 0 : adds ? 1 : (2 * (tensor - 1)) / tensor;
  return [...Array(stages).keys()].map((stage) => {
    const layers = Math.floor(model.num_layers / stages) + (stage < model.num_layers % stages);
    const [first, last, reduced] = [stage === 0, stage === stages - 1, 2 * layers * factor * row_bytes];
    return { layers, weights: rooflab.weightBytes(model, dtype, tensor, { layers, first, last }), reduced,
      kv: rooflab.kvBytes(model, "bf16", tensor, layers), sent: last ? 0 : row_bytes,
      reduced_ms: (1e3 * reduced) / (nvlink || gpu.pcie_bytes_per_s) };
  });
};
rooflab.widget("ranks", ["models", "gpus"], (root, [{ models }, { gpus }]) => {
  const [counts, gpu] = [[1, 2, 4, 8], gpus["h100-sxm"]];
  const controls = [["model", "model", Object.keys(models)], ["tensor", "GPUs of a stage", counts],
    ["stages", "stages", counts], ["replicas", "replicas", counts],
    ["rows", "tokens in the step", { min: 1, max: 8192 }]];
  const state = { model: "llama-3.1-70b", tensor: 4, stages: 1, replicas: 1, rows: 64 };
  rooflab.panel(root, state, controls, (at) => {
    const model = models[at.model];
    if (!rooflab.gpuCounts(model).includes(at.tensor)) {
      return [`The heads of ${model.name} cannot be split over ${at.tensor} GPUs.`];
    }
    const ranks = rooflab.ranks(model, gpu, at);
    const fit = ranks.every(({ weights }) => weights <= 0.9 * gpu.hbm_bytes) ? "fit" : "do not fit";
    const head = ["stage", "layers", "weights", "KV of a token", "all-reduces", "sends on"];
    return [`GPUs: ${at.tensor * at.stages * at.replicas}. The weights ${fit} on an H100 with 80 GB.`,
      rooflab.table(`Each GPU of a stage, in a step of ${at.rows} tokens`, head,
        ranks.map(({ layers, weights, kv, reduced, sent }, i) =>
          [i + 1, layers, ...[weights, kv, reduced, sent].map(rooflab.bytes)]))];
  });
});
