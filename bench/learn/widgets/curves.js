// Predicted curves of the simulated clock, for two settings beside each other.
rooflab.widget("curves", ["curves"], (root, [{ rates, settings }]) => {
  const names = { itl_p99_ms: "ITL p99, ms", itl_p50_ms: "ITL p50, ms", ttft_p50_ms: "TTFT p50, ms",
    ttft_p99_ms: "TTFT p99, ms", goodput_requests_per_s: "goodput, requests/s", output_tokens_per_s: "output tokens/s",
    rates: "requests/s sent" };
  const options = settings.map(({ max_num_seqs: most, prefill_chunk: chunk, prefix_caching: caching }, i) =>
    [i, `batch up to ${most}, ${chunk ? `chunks of ${chunk}` : "no chunks"}, ${caching ? "with" : "no"} prefix cache`]);
  const axis = Object.entries(names);
  const controls = [["A", "setting A", options], ["B", "setting B", options], ["y", "upwards", axis.slice(0, 6)],
    ["x", "to the right", axis.slice(5)]];
  rooflab.panel(root, { A: 4, B: 6, y: "itl_p99_ms", x: "rates" }, controls, (at) => {
    const both = ["A", "B"].map((label) => [label, { ...settings[at[label]], rates }]);
    const title = `Predicted: ${names[at.y]}`;
    const series = both.map(([label, own]) => [label, own[at.x].map((x, i) => [x, own[at.y][i]])]);
    return ["", rooflab.lines(title, series, { x: names[at.x], y: names[at.y] }), rooflab.table(title,
      [names.rates, "A", "B"], rates.map((rate, i) => [rate, ...both.map(([, own]) => rooflab.digits(own[at.y][i]))]))];
  });
});
