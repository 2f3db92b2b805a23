// The recorded answer step by step.  From `rooflab serve`, the page can also ask that server.
rooflab.widget("answer", ["run"], (root, [run]) => {
  const [tokens, ledger, status] = [rooflab.el("div", { class: "chips" }), rooflab.el("div"), rooflab.status()];
  const draw = (count) => {
    tokens.replaceChildren(...run.steps.slice(0, count).map((step, i) =>
      rooflab.el("span", { text: run.answer[i][1] }, rooflab.el("small", { text: rooflab.ms(step.ms) }))));
    const kind = count > 1 ? "decode" : "prefill";
    const rows = run.ledger[kind].rows.map(([op, site, , ...own]) => [site ? `${site} (${op})` : op, ...own]);
    rows.push(["all ops", ...[1, 2, 3].map((column) => rows.reduce((sum, row) => sum + row[column], 0))]);
    ledger.replaceChildren(count ? rooflab.table(`Ops of a ${kind} step`, ["op", "calls", "ms", "MB"],
      rows.map(([op, calls, ...others]) => [op, calls, ...others.map(rooflab.digits)])) : "");
    const itl = count > 1 ? `, ITL ${rooflab.ms(run.itl_ms)} (the median gap of the run)` : "";
    status.textContent = count ? `TTFT ${rooflab.ms(run.ttft_ms)}${itl}` : `A prompt of ${run.prompt.length} tokens.`;
  };
  root.append(rooflab.steps(() => run.steps.length, draw), tokens, status, ledger);
  if (location.protocol.startsWith("http")) root.append(...live(run.question));
  draw(0);
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
    const [messages, models] = [[{ role: "user", content: input.value }], await (await sent("/v1/models")).json()];
    const fixed = { model: models.data[0].id, stream: true, max_tokens: 64, temperature: 0 };
    const body = JSON.stringify({ ...fixed, messages });
    const times = [performance.now()];
    const reply = await sent("/v1/chat/completions", { method: "POST", body });
    let rest = "";
    answer.textContent = "";
    for await (const text of reply.body.pipeThrough(new TextDecoderStream())) {
      const events = (rest + text).split("\n\n");
      rest = events.pop();
      for (const event of events.filter((one) => one.startsWith("data: {"))) {
        const word = JSON.parse(event.slice(6)).choices[0].delta.content;
        if (word) times.push(performance.now());
        answer.append(word ?? "");
      }
    }
    const [ttft, ...gaps] = times.slice(1).map((time, i) => time - times[i]);
    const itl = gaps.sort((a, b) => a - b)[gaps.length >> 1];
    status.textContent = `TTFT ${rooflab.ms(ttft)}, ITL ${rooflab.ms(itl)} (median), as this page got the tokens.`;
  };
  const failed = (error) => { status.textContent = error.message; };
  return [input, rooflab.button("ask this server", () => ask().catch(failed)), answer, status];
}
