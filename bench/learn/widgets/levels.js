// Section 13: the memory levels of an H100, with the bytes that a chosen kernel moves at each.
const moved = (kernel) => ({
  hbm: kernel.hbm_read_bytes + kernel.hbm_write_bytes,
  l2: kernel.l2_read_sector_bytes ?? kernel.l2_read_bytes,
  shared: kernel.basis === "counted" ? kernel.shared_read_bytes + kernel.shared_write_bytes : null,
});

// Boxes from HBM down to the registers of one SM; `labels` stand at the arrows between them.
function drawing(device, kernel) {
  const { svg, bytes } = rooflab;
  const kib = (n) => `${Math.round(n / 1024)} KiB`;
  const counts = moved(kernel);
  const root = svg("svg", { viewBox: "0 0 320 318", role: "img", style: "max-width: 460px", "font-size": 13,
    "aria-label": `${device.full_name}: HBM, L2 and an SM, with the bytes of ${kernel.name}` });
  const text = (x, y, words) => root.append(svg("text", { x, y, text: words }));
  const box = (y, height, title, words) => {
    root.append(svg("rect", { x: 1, y, width: 318, height, fill: "var(--head)", stroke: "var(--soft)" }));
    text(8, y + 17, title);
    text(8, y + 34, words);
  };
  const arrow = (y, words) => {
    const d = `M20 ${y}v34m-4 -6l4 6l4 -6m-8 -22l4 -6l4 6`;
    root.append(svg("path", { d, fill: "none", stroke: "var(--ink)" }));
    text(34, y + 22, words);
  };
  box(1, 44, `${device.hbm_kind}: ${bytes(device.hbm_bytes)}`, `${bytes(device.hbm_bytes_per_s)}/s, for all SMs`);
  arrow(48, `${bytes(counts.hbm)} (read ${bytes(kernel.hbm_read_bytes)})`);
  box(85, 44, `L2: ${Math.round(device.l2_bytes / 2 ** 20)} MiB`, "for all SMs");
  arrow(132, `${bytes(counts.l2)} to the SMs`);
  box(169, 148, `${device.sms} SMs; each of them has`, `shared memory: ${kib(device.smem_bytes_per_sm)}`);
  text(8, 220, `(${kib(device.smem_bytes_per_cta)} at most for one CTA)`);
  text(8, 246, counts.shared === null ? "(not seen: torch's kernels)" : `↕ ${bytes(counts.shared)} in and out`);
  text(8, 272, `registers: ${kib(4 * device.registers_per_sm)}`);
  text(8, 298, kernel.instructions ? `${rooflab.digits(kernel.instructions / 1e6)} million thread instructions` : "");
  return root;
}

function compared(one, kernel) {
  const { el, bars, bytes } = rooflab;
  const shown = [...new Set([one.kernels[0], kernel])];
  const level = (title, key, ...more) => {
    const words = (n, own) => (n === null ? "not seen" : bytes(n) + (own.basis === "counted" ? "" : ", modelled"));
    const row = (own, n) => ({ label: own.name, value: n ?? 0, text: words(n, own) });
    const rows = shown.map((own) => row(own, moved(own)[key]));
    return [el("h3", { text: title }), bars(title, [...rows, ...more])];
  };
  const least = { label: "the least that the op needs", value: one.least_bytes, text: bytes(one.least_bytes) };
  return [...level("HBM, read and written", "hbm", least), ...level("L2 to SMs, hits in L1 not taken off", "l2"),
    ...level("shared memory, in and out", "shared")];
}

rooflab.widget("levels", ["levels"], (root, [levels]) => {
  const { el, choice, status } = rooflab;
  const cases = Object.entries(levels.ops).flatMap(([op, own]) => own.map((one) => ({ op, ...one })));
  const [picks, view, said] = [el("div"), el("div"), status()];
  const show = (one, name) => {
    const kernel = one.kernels.find((own) => own.name === name);
    view.replaceChildren(drawing(levels.device, kernel), ...compared(one, kernel),
      el("p", {}, `${name}: ${kernel.line}. Its file: `, el("code", { text: kernel.code }), ". Count it again: ",
        el("code", { text: kernel.command })));
    const [own, least] = [moved(kernel).hbm, one.least_bytes].map(rooflab.bytes);
    said.textContent = `${one.op} ${name}: ${own} at HBM. The op needs at least ${least}.`;
  };
  const pick = (index) => {
    const one = cases[index];
    const last = one.kernels[one.kernels.length - 1].name;
    picks.replaceChildren(choice("Kernel", one.kernels.map((own) => own.name), last, (name) => show(one, name)));
    show(one, last);
  };
  const start = cases.findIndex((one) => one.op === "flash_attention");
  root.append(choice("Case", cases.map((one, index) => [String(index), `${one.op}: ${one.why}`]), String(start), pick),
    picks, said, view);
  pick(start);
});
