"""Draws the page's figures of kernels: what moves before a change and after it.  All counts are of the record `levels`.

`figures.toml` has their words.  `docs/ladders/` shows the same figures.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from rooflab.bench.base.plain import JsonObject
from rooflab.bench.learn.sketch import WIDTH, Sketch, size

WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())
FP32_BYTES, BANKS, COLUMN, SM_COLUMNS, MOST_ARROWS = 4, 32, 5, 22, 24
Facts = dict[str, Any]


class FigureState(NamedTuple):
    """One state of a figure: the words of its button, its drawing, and the text below the drawing."""

    label: str
    svg: str
    text: str


class StateFigure(NamedTuple):
    """Shows one change of a kernel by the states before and after it."""

    name: str
    title: str
    states: Sequence[FigureState]


def hbm(kernel: Mapping[str, Any]) -> int:
    """Returns the bytes that a kernel reads from HBM and writes to it."""
    return int(kernel["hbm_read_bytes"] + kernel["hbm_write_bytes"])


def from_l2(kernel: Mapping[str, Any]) -> int:
    """Returns the bytes that the SMs ask of L2, in whole sectors where these were counted."""
    return int(kernel.get("l2_read_sector_bytes", kernel["l2_read_bytes"]))


MEASURES: Mapping[str, tuple[str, str, Callable[[Facts], int]]] = {
    "hbm": ("HBM, read and written", "B", hbm),
    "read": ("read from HBM", "B", lambda facts: int(facts["hbm_read_bytes"])),
    "l2": ("L2 to SMs, no hit in L1", "B", from_l2),
    "least": ("the least that the op needs", "B", lambda facts: int(facts["least_bytes"])),
    "flops": ("tensor cores", "FLOP", lambda facts: int(facts["tensor_flops"])),
    "instructions": ("thread instructions", "", lambda facts: int(facts["instructions"])),
    "turns": ("wavefronts for one store", "", lambda facts: int(facts["turns"])),
}
"""By name: the label of a bar, its unit, and how its value is found.  Bars of one unit have one scale in a figure."""


def figures(data: Mapping[str, JsonObject]) -> dict[str, StateFigure]:
    """Returns the figures by name.  Raises `ValueError` if the record `levels` lacks a kernel that they show."""
    return {name: _figure(data["levels"], name, words) for name, words in WORDS.items()}


def facts_of_kernel(levels: JsonObject, op: str, kernel: str) -> Facts:
    """Returns the sizes of a case and the counts of a kernel.  `kernel` is its name; `name#1` means the second case.

    Raises `ValueError` if the record has no such kernel."""
    record: Any = levels
    name, _, index = kernel.partition("#")
    case = record["ops"][op][int(index or 0)]
    found = [one for one in case["kernels"] if one["name"] == name]
    if not found:
        raise ValueError(f"levels: expected the kernel {name} of {op} at {case['case']}, got none")
    sizes = {**case["sizes"], "least_bytes": case["least_bytes"], "sms": record["device"]["sms"]}
    return {**sizes, **found[0]["config"], **found[0]}


def _figure(levels: JsonObject, name: str, words: Mapping[str, Any]) -> StateFigure:
    record: Any = levels
    if "op" in words:
        facts = [facts_of_kernel(levels, words["op"], state["kernel"]) for state in words["states"]]
    else:
        own = {"turns": record["banks"], "findings": record["fence"]}
        kinds = [state["kernel"] for state in words["states"]]
        facts = [{"name": kind} | {key: all_[kind] for key, all_ in own.items() if kind in all_} for kind in kinds]
    bars = [MEASURES[measure] for measure in words.get("bars", ())]
    most = {unit: max(value(one) for one in facts for _, u, value in bars if u == unit) for _, unit, _ in bars}
    states = []
    for state, one in zip(words["states"], facts, strict=True):
        sketch = Sketch()
        _DRAWERS[name](sketch, one)
        for label, unit, value in bars:
            sketch.bar(label, size(value(one), unit), value(one) / most[unit])
        text = state["text"].format_map(one)
        states.append(FigureState(state["label"], sketch.svg(f"{words['title']}: {state['label']}", text), text))
    return StateFigure(name, words["title"], states)


def _attention_scores(sketch: Sketch, facts: Facts) -> None:
    on_chip, tile = "block_m" in facts, f"{facts.get('block_m')} × {facts.get('block_n')}"
    facts["scores"] = size(FP32_BYTES * facts["B"] * facts["H"] * facts["T"] * facts["S"])
    sketch.box(1, 1, 318, 92, "HBM:", "head")
    for place, name in enumerate(("q", "k", "v", "out")):
        sketch.box(10 + 34 * place, 30, 30, 50, name)
    written, fill = ("no scores", "page") if on_chip else (f"scores\n{facts['scores']} in fp32", "bar")
    sketch.box(160, 26, 150, 58, written, fill)
    sketch.arrow(60, 94, 60, 132, f"read {size(facts['hbm_read_bytes'])}")
    sketch.arrow(190, 132, 190, 94, f"write {size(facts['hbm_write_bytes'])}")
    sketch.box(1, 134, 318, 84, "SMs:", "head")
    sketch.box(10, 158, 140, 50, "tiles of q, k and v" if on_chip else "a part of the\noperands")
    sketch.box(160, 158, 150, 50, f"scores\n{tile}" if on_chip else "a part of a result", "bar" if on_chip else "page")


def _causal_mask(sketch: Sketch, facts: Facts) -> None:
    rows, keys = facts["block_m"], facts["block_n"]
    columns, lines, name = facts["S"] // keys, facts["T"] // rows, facts["name"]

    def kind(column: int, row: int) -> str:
        if facts["causal"] and column * keys >= (row + 1) * rows:
            return ""
        crossed = (column + 1) * keys > row * rows
        return "hatched" if facts["causal"] and (crossed or name == "online") else "full"

    kinds = [kind(column, row) for row in range(lines) for column in range(columns)]
    sketch.text(2, 14, f"across: {columns} tiles of {keys} keys")
    sketch.text(2, 31, f"down: {lines} tiles of {rows} queries")
    sketch.cells(2, 38, (columns, lines), (316 / columns, 144 / lines), kind, "bar")
    sketch.text(2, 200, f"computed (coloured): {len(kinds) - kinds.count('')} of {len(kinds)}")
    sketch.text(2, 217, f"with a mask (hatched): {kinds.count('hatched')}")


def _gemm_operands(sketch: Sketch, facts: Facts) -> None:
    loads = {"one_thread": (5, 4, 0), "tensor_core": (44, 52, 0), "multicast": (88, 52, 1)}
    height, width, paired = loads[facts["name"]]
    sketch.text(2, 14, f"M = {facts['M']}, N = {facts['N']}, K = {facts['K']}")
    for x, y, w, h, part_x, part_y, part_w, part_h, words, fill in (
        (112, 22, 206, 76, 148, 22, width, 76, "B", "bar"),
        (2, 104, 102, 88, 2, 104, 102, height, "A", "bar"),
        (112, 104, 206, 88, 148, 104, width, height, "result", "read"),
    ):
        sketch.box(x, y, w, h, fill="head")
        sketch.box(part_x, part_y, part_w, part_h, fill=fill)
        sketch.text(x + w - 6, y + h - 6, words, "end")
    for cta in range(2 * paired):
        sketch.box(148, 104 + 44 * cta, 52, 44, f"CTA {cta}")
        sketch.text(8, 131 + 44 * cta, f"for CTA {cta}")
    if paired:
        sketch.text(206, 62, "for both CTAs")


def _shared_banks(sketch: Sketch, facts: Facts) -> None:
    places = {
        "plain": [COLUMN] * BANKS,
        "padded": [(COLUMN + lane) % BANKS for lane in range(BANKS)],
        "swizzled": [COLUMN ^ lane for lane in range(BANKS)],
    }[facts["name"]]
    sketch.text(2, 14, "across: 32 banks")
    sketch.text(2, 31, "down: 32 lanes, each stores a word (filled)")
    sketch.cells(2, 38, (BANKS, BANKS), (9.875, 6), lambda column, row: "full" if places[row] == column else "")


def _proxy_fence(sketch: Sketch, facts: Facts) -> None:
    fenced = not facts["findings"]
    sketch.box(1, 4, 318, 40, "threads store a tile: st.shared", "head")
    sketch.arrow(160, 45, 160, 66)
    sketch.box(1, 68, 318, 40, "fence.proxy.async" if fenced else "no fence", "bar" if fenced else "page")
    sketch.arrow(160, 109, 160, 130)
    sketch.box(1, 132, 318, 40, "tensor cores read the tile: wgmma", "head")
    sketch.text(2, 196, "The emulator says:", bold=True)
    for number, line in enumerate(wrap(" ".join(facts["findings"]) or "nothing", 39)):
        sketch.text(2, 214 + 17 * number, line)


def _split_keys(sketch: Sketch, facts: Facts) -> None:
    ctas, heads, sms = facts["ctas"], facts["H_kv"], facts["sms"]
    parts = ctas // heads
    facts["idle"] = max(0, sms - ctas)
    sketch.text(2, 14, f"{heads} KV heads (down), {facts['context']:,} keys (across)")
    sketch.cells(2, 22, (parts, heads), (316 / parts, 22), lambda column, row: "full")
    sketch.text(2, 110, f"{sms} SMs; {sms - facts['idle']} can have a CTA (filled)")
    sketch.cells(2, 118, (SM_COLUMNS, sms // SM_COLUMNS), (14.3, 14), lambda c, r: "full" * (SM_COLUMNS * r + c < ctas))


def _pages_in_place(sketch: Sketch, facts: Facts) -> None:
    facts["group"] = facts["H"] // facts["H_kv"]
    copied, pages = facts["name"] == "library", -(-facts["context"] // facts["block_size"])
    sketch.text(2, 14, f"{pages} pages of {facts['block_size']} tokens, anywhere in HBM")
    sketch.cells(2, 22, (16, 1), (19.75, 26), lambda column, row: "full" * (column in (1, 4, 6, 9, 13)))
    sketch.arrow(60, 50, 60, 82, "read and written" if copied else "read once")
    between, fill = ("a dense copy in HBM", "bar") if copied else ("block table: which page is next", "head")
    sketch.box(2, 84, 316, 36, between, fill)
    sketch.arrow(60, 121, 60, 153, "read again" if copied else "")
    shared = "" if copied else f": {facts['group']} query heads use each key"
    sketch.box(2, 155, 316, 36, f"attention{shared}", "head")


def _fused_norm(sketch: Sketch, facts: Facts) -> None:
    apart = facts["name"] == "library"
    sketch.box(1, 1, 318, 40, "HBM: x, residual, sum, result", "head")
    sketch.arrow(10, 42, 10, 94, "x, residual")
    sketch.arrow(112, 94, 112, 42, "sum")
    sketch.arrow(256, 94, 256, 42, "result")
    sketch.box(1, 96, 150 if apart else 318, 44, "add" if apart else "add and norm, in registers", "bar")
    if apart:
        sketch.arrow(184, 42, 184, 94, "sum")
        sketch.box(168, 96, 151, 44, "norm", "bar")


def _sampling_passes(sketch: Sketch, facts: Facts) -> None:
    reads = from_l2(facts) / facts["least_bytes"]
    shown = min(max(1, round(reads)), MOST_ARROWS)
    sketch.box(2, 1, 316, 44, f"{facts['B']} rows of {facts['V']:,} logits\n{size(facts['least_bytes'])}", "head")
    for number in range(shown):
        x = WIDTH / 2 + 12 * (number - (shown - 1) / 2)
        sketch.arrow(x, 46, x, 78)
    launches = f"{facts['launches']} launch{'es' * (facts['launches'] != 1)}"
    sketch.box(2, 80, 316, 36, f"{facts['name']}: {launches}", "bar")
    more = f" ({shown} arrows)" if shown < round(reads) else ""
    sketch.text(2, 136, f"reads: {reads:.3g} times the logits' bytes{more}")


_DRAWERS = {
    draw.__name__.removeprefix("_"): draw
    for draw in (
        *(_attention_scores, _causal_mask, _gemm_operands, _shared_banks, _proxy_fence),
        *(_split_keys, _pages_in_place, _fused_norm, _sampling_passes),
    )
}
