// The memory levels of an H100, with the bytes that a chosen kernel moves at each.
const moved = (kernel) => ({
  hbm: kernel.hbm_read_bytes + kernel.hbm_write_bytes,
  l2: kernel.l2_read_sector_bytes ?? kernel.l2_read_bytes,
  shared: kernel.basis === "counted" ? kernel.shared_read_bytes + kernel.shared_write_bytes : null,
});

// Boxes from HBM down to the registers of one SM, and arrows between them with the kernel's bytes.
function picture(device, kernel) {
  const { svg, bytes } = rooflab;
  const [kib, { hbm, l2, shared }] = [(n) => `${Math.round(n / 1024)} KiB`, moved(kernel)];
  const boxes = [[1, 44], [85, 44], [169, 148]].map(([y, height]) =>
    svg("rect", { x: 1, y, width: 318, height, fill: "var(--head)", stroke: "var(--soft)" }));
  const arrows = [48, 132].map((y) =>
    svg("path", { d: `M20 ${y}v34m-4 -6l4 6l4 -6m-8 -22l4 -6l4 6`, fill: "none", stroke: "var(--ink)" }));
  const words = [[18, `${device.hbm_kind}: ${bytes(device.hbm_bytes)}`],
    [35, `${bytes(device.hbm_bytes_per_s)}/s, for all SMs`],
    [70, `${bytes(hbm)} (read ${bytes(kernel.hbm_read_bytes)})`, 34],
    [102, `L2: ${Math.round(device.l2_bytes / 2 ** 20)} MiB`], [119, "for all SMs"],
    [154, `${bytes(l2)} to the SMs`, 34],
    [186, `${device.sms} SMs; each of them has`], [203, `shared memory: ${kib(device.smem_bytes_per_sm)}`],
    [220, `(${kib(device.smem_bytes_per_cta)} at most for one CTA)`],
    [246, shared === null ? "(not seen: torch's kernels)" : `↕ ${bytes(shared)} in and out`],
    [272, `registers: ${kib(4 * device.registers_per_sm)}`],
    [298, kernel.instructions ? `${rooflab.digits(kernel.instructions / 1e6)} million thread instructions` : ""]];
  return rooflab.el("div", { style: "max-width: 460px" }, rooflab.drawing(
    `${device.full_name}: HBM, L2 and an SM, with the bytes of ${kernel.name}`, 320, 318, ...boxes, ...arrows,
    ...words.map(([y, text, x = 8]) => svg("text", { x, y, text, "font-size": 13 }))));
}

// Bars of the chosen kernel below those of the first kernel, at each level.
function compared({ kernels, least_bytes: least }, kernel) {
  const level = (title, key, ...more) => {
    const rows = [...new Set([kernels[0], kernel])].map((own) => {
      const value = moved(own)[key];
      return [own.name, value ?? 0, undefined, value === null ? "not seen"
        : rooflab.bytes(value) + (own.basis === "counted" ? "" : ", modelled")];
    });
    return [rooflab.el("h3", { text: title }), rooflab.bars(title, [...rows, ...more], rooflab.bytes)];
  };
  return [...level("HBM, read and written", "hbm", ["the least that the op needs", least]),
    ...level("L2 to SMs, hits in L1 not taken off", "l2"), ...level("shared memory, in and out", "shared")];
}

rooflab.widget("levels", ["levels"], (root, [{ device, ops }]) => {
  const { el } = rooflab;
  const cases = Object.entries(ops).flatMap(([op, own]) => own.map((one) => ({ op, ...one })));
  const start = cases.findIndex((one) => one.op === "flash_attention");
  const names = cases.map((one, i) => [i, `${one.op}: ${one.why}`]);
  rooflab.panel(root, { at: start }, [["at", "Case", names]], ({ at }) => {
    const [one, own] = [cases[at], el("div")];
    const kernels = one.kernels.map(({ name }, i) => [i, name]);
    rooflab.panel(own, { kernel: kernels.length - 1 }, [["kernel", "Kernel", kernels]], (state) => {
      const kernel = one.kernels[state.kernel];
      return [`${kernel.name}: ${rooflab.bytes(moved(kernel).hbm)} at HBM.`, picture(device, kernel),
        ...compared(one, kernel), el("p", {}, `${kernel.name}: ${kernel.line}. Its file: `,
          el("code", { text: kernel.code }), ". Count it again: ", el("code", { text: kernel.command }))];
    });
    return [`${one.op} needs at least ${rooflab.bytes(one.least_bytes)} of HBM.`, own];
  });
});
