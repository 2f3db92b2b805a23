// SmolLM2's tokenizer. Ids: the special tokens, then single bytes, then what each merge makes of a left and a right.
const SPACE = "\\p{White_Space}";
const PIECES = new RegExp(`'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+|`
  + `${SPACE}+(?![^${SPACE}])|${SPACE}+`, "gu");

const index = (vocabulary) => (vocabulary.index ??= {
  special: new RegExp(`(${vocabulary.special.map((name) => name.replace(/\W/g, "\\$&")).join("|")})`),
  first: vocabulary.special.length + vocabulary.bytes.length,
  byte: new Map(vocabulary.bytes.map((value, i) => [value, vocabulary.special.length + i])),
  merge: new Map(vocabulary.left.map((one, i) => [one * 65536 + vocabulary.right[i], i])),
});

// Joins the pair whose merge is the earliest, again and again. A byte that no token has is left out.
function merged(piece, { byte, merge, first }) {
  const ids = [...new TextEncoder().encode(piece)].map((value) => byte.get(value)).filter((id) => id !== undefined);
  for (;;) {
    const ranks = ids.slice(1).map((right, i) => merge.get(ids[i] * 65536 + right) ?? Infinity);
    const best = ranks.reduce((least, rank) => Math.min(least, rank), Infinity);
    if (best === Infinity) return ids;
    ids.splice(ranks.indexOf(best), 2, first + best);
  }
}

rooflab.tokenize = (vocabulary, text) => text.split(index(vocabulary).special).flatMap((part, i) => {
  if (i % 2) return [vocabulary.special.indexOf(part)];
  const pieces = part.split(/(\p{N})/u).flatMap((some) => some.match(PIECES) ?? []);
  return pieces.flatMap((piece) => merged(piece, index(vocabulary)));
});

// The merges that make a token, in order: [left, right, made].
rooflab.merges = (vocabulary, id) => {
  const i = id - index(vocabulary).first;
  if (i < 0) return [];
  const pair = [vocabulary.left[i], vocabulary.right[i]];
  return [...pair.flatMap((part) => rooflab.merges(vocabulary, part)), [...pair, id]];
};

rooflab.tokenName = ({ special, bytes, left, right }, id) => {
  const first = special.length + bytes.length;
  const pair = (one) => [left[one - first], right[one - first]];
  const raw = (one) => (one < first ? [bytes[one - special.length]] : pair(one).flatMap(raw));
  if (id < special.length) return special[id];
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(raw(id)));
  } catch {
    return `bytes:${raw(id).map((value) => `\\x${value.toString(16).padStart(2, "0")}`).join("")}`;
  }
};

rooflab.widget("tokens", ["vocabulary", "run"], (root, [vocabulary, run]) => {
  const { el } = rooflab;
  const name = (id) => rooflab.quoted(rooflab.tokenName(vocabulary, id));
  const merges = el("div");
  const choose = (id) => {
    const rows = rooflab.merges(vocabulary, id).map((ids, i) => [i + 1, ...ids.map(name)]);
    const caption = `${name(id)}, token ${id}: merges: ${rows.length}`;
    merges.replaceChildren(rooflab.table(caption, ["step", "left", "right", "made"], rows));
  };
  const text = (show) => el("label", {}, "Text", el("input", { type: "text", value: run.question,
    on: { input: (event) => { state.text = event.target.value; show(); } } }));
  const state = { text: run.question };
  rooflab.panel(root, state, [text], () => {
    const ids = rooflab.tokenize(vocabulary, state.text);
    if (ids.length) choose(Math.max(...ids)); // the last of the merges: often the longest
    return [`tokens: ${ids.length}, characters: ${[...state.text].length}`,
      rooflab.chips(ids.map((id) => [name(id), id]), (i) => choose(ids[i])), merges];
  });
});
