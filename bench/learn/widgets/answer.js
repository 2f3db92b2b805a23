// The recorded answer step by step.  From `rooflab serve`, the page can also ask that server.
rooflab.widget("answer", ["run"], (root, [run]) => {
  const state = { count: 0 };
  rooflab.panel(root, state, [rooflab.steps(state, () => run.steps.length)], ({ count }) => {
    if (!count) return [`A prompt of ${run.prompt.length} tokens.`];
    const kind = count > 1 ? "decode" : "prefill";
    const rows = run.ledger[kind].rows.map(([op, site, , ...own]) => [site ? `${site} (${op})` : op, ...own]);
    rows.push(["all ops", ...[1, 2, 3].map((column) => rooflab.sum(rows.map((row) => row[column])))]);
    const itl = count > 1 ? `, ITL ${rooflab.ms(run.itl_ms)} (the median gap of the run)` : "";
    return [`TTFT ${rooflab.ms(run.ttft_ms)}${itl}`,
      rooflab.chips(run.steps.slice(0, count).map((step, i) => [run.answer[i][1], rooflab.ms(step.ms)])),
      rooflab.table(`Ops of a ${kind} step`, ["op", "calls", "ms", "MB"],
        rows.map(([op, calls, ...others]) => [op, calls, ...others.map(rooflab.digits)]))];
  });
  if (location.protocol.startsWith("http")) root.append(...live(run.question));
});

function live(question) {
  const input = rooflab.el("input", { type: "text", value: question, "aria-label": "Question for this server" });
  const [answer, status] = [rooflab.el("p"), rooflab.status()];
  const sent = async (path, options) => {
    const reply = await fetch(path, { headers: { "content-type": "application/json" }, ...options });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    return reply;
  };
  const ask = async () => {
    const model = (await (await sent("/v1/models")).json()).data[0].id;
    const messages = [{ role: "user", content: input.value }];
    const body = JSON.stringify({ model, messages, stream: true, max_tokens: 64, temperature: 0 });
    const times = [performance.now()];
    const reply = await sent("/v1/chat/completions", { method: "POST", body });
    let text = "";
    for await (const part of reply.body.pipeThrough(new TextDecoderStream())) {
      text += part;
      const events = [...text.matchAll(/^data: (\{.*\})\n/gm)].map(([, event]) => JSON.parse(event));
      const words = events.map((event) => event.choices[0].delta.content).filter(Boolean);
      while (times.length <= words.length) times.push(performance.now());
      answer.textContent = words.join("");
    }
    const [ttft, ...gaps] = times.slice(1).map((time, i) => time - times[i]);
    status.textContent = `TTFT ${rooflab.ms(ttft)}, ITL ${rooflab.ms(rooflab.median(gaps))} (median), `
      + "as this page got the tokens.";
  };
  const failed = (error) => { status.textContent = error.message; };
  return [input, rooflab.button("ask this server", () => ask().catch(failed)), answer, status];
}
