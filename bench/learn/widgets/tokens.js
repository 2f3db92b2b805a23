// SmolLM2's tokenizer. Tokens are the special ones, then single bytes, then what each merge of a left and a right makes.
const SPACE = "\\p{White_Space}";
const PIECES = new RegExp(`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+|`
  + `${SPACE}+(?![^${SPACE}])|${SPACE}+`, "gu");

function index(vocabulary) {
  const { special, bytes, left, right } = vocabulary;
  const longest = [...special].sort((a, b) => b.length - a.length).map((name) => name.replace(/\W/g, "\\$&"));
  return (vocabulary.index ??= {
    special: new RegExp(`(${longest.join("|")})`),
    first: special.length + bytes.length,
    byte: new Map(bytes.map((value, i) => [value, special.length + i])),
    merge: new Map(left.map((one, i) => [one * 65536 + right[i], i])),
  });
}

// Joins the pair whose merge is the earliest, again and again. A byte that no token has is left out.
function merged(piece, { byte, merge, first }) {
  const ids = [...new TextEncoder().encode(piece)].map((value) => byte.get(value)).filter((id) => id !== undefined);
  for (;;) {
    let [best, at] = [Infinity, 0];
    for (let i = 0; i + 1 < ids.length; i++) {
      const rank = merge.get(ids[i] * 65536 + ids[i + 1]);
      if (rank < best) [best, at] = [rank, i];
    }
    if (best === Infinity) return ids;
    ids.splice(at, 2, first + best);
  }
}

rooflab.tokenize = (vocabulary, text) => text.split(index(vocabulary).special).flatMap((part, i) =>
  (i % 2 ? [vocabulary.special.indexOf(part)]
    : part.split(/(\p{N})/u).flatMap((some) => some.match(PIECES) ?? [])
      .flatMap((piece) => merged(piece, index(vocabulary)))));

// The merges that make a token, in order: [left, right, made].
rooflab.merges = (vocabulary, id) => {
  const i = id - index(vocabulary).first;
  if (i < 0) return [];
  const pair = [vocabulary.left[i], vocabulary.right[i]];
  return [...pair.flatMap((part) => rooflab.merges(vocabulary, part)), [...pair, id]];
};

rooflab.tokenName = (vocabulary, id) => {
  const { special, bytes, left, right } = vocabulary;
  if (id < special.length) return special[id];
  const { first } = index(vocabulary);
  const raw = (one) => (one < first ? [bytes[one - special.length]]
    : [...raw(left[one - first]), ...raw(right[one - first])]);
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(raw(id)));
  } catch {
    return `bytes:${raw(id).map((value) => `\\x${value.toString(16).padStart(2, "0")}`).join("")}`;
  }
};

rooflab.widget("tokens", ["vocabulary", "run"], (root, [vocabulary, run]) => {
  const { el, quoted } = rooflab;
  const [chips, merges, said] = [el("div", { class: "chips" }), el("div"), rooflab.status()];
  const name = (id) => quoted(rooflab.tokenName(vocabulary, id));
  const choose = (id) => {
    const rows = rooflab.merges(vocabulary, id).map(([left, right, made], i) => [i + 1, name(left), name(right), name(made)]);
    merges.replaceChildren(rooflab.table(`${name(id)}, token ${id}, is made by ${rows.length} merges`,
      ["step", "left", "right", "made"], rows));
  };
  const show = () => {
    const ids = rooflab.tokenize(vocabulary, input.value);
    chips.replaceChildren(...ids.map((id) => el("button", { type: "button", on: { click: () => choose(id) } },
      name(id), el("small", { text: id }))));
    said.textContent = `${ids.length} tokens, ${[...input.value].length} characters`;
    if (ids.length) choose(ids[ids.length - 1]);
  };
  const input = el("input", { type: "text", value: run.question, on: { input: show } });
  root.append(el("label", {}, "Text", input), said, chips, el("p", { text: "Choose a token to see its merges." }), merges);
  show();
});
