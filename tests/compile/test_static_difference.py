"""The differences between two sides' compiled code that count as a loss, for any number and names of launches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rooflab.bench.compile.cases import Query
from rooflab.bench.compile.difference import CodeChange, changed, exit_status, markdown, matched, new, summary_line
from rooflab.bench.compile.static import CompileFailure
from rooflab.bench.compile.summary import Option, Summary

IDENTITY = ("gemm", "tiled", "bf16", "M=64")
PLAIN = Summary(
    **{"name": "k", "backend": "triton", "target": "sm_90a", "device": "h100-sxm", "code_hash": "a"},
    **{"grid": (64,), "launches": 1, "ctas": 64, "threads": 128},
    **{"registers": 40, "stack_bytes": 0, "spill_loads": 0, "spill_stores": 0, "shared_bytes": 0},
    **{"ctas_per_sm": 12, "occupancy": 0.75, "occupancy_limiter": "registers", "tensor_path": "none"},
    **{"waves": 64 / (12 * 132), "full_waves": 0, "tail_ctas": 64, "wave_efficiency": 0.04},
    **{f"load_bytes_{which}": 16 for which in ("worst", "usual")},
    **{"counts": {}, "loop": None, "options": (), "asked": {}},
)
OTHER = replace(PLAIN, code_hash="b")
WGMMA = replace(PLAIN, name="product", tensor_path="wgmma", code_hash="c")
MMA = replace(WGMMA, tensor_path="mma", code_hash="d")
SPILLING = replace(PLAIN, stack_bytes=8, spill_loads=1, spill_stores=1, code_hash="e")
REDUCE = replace(PLAIN, name="reduce", code_hash="f")
BROKEN, REFUSED = CompileFailure("it broke"), CompileFailure("not for this", refused=True)


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        ([PLAIN], [PLAIN], "SAME"),
        ([PLAIN], [OTHER], "CHANGED"),
        ([PLAIN], [replace(PLAIN, grid=(65,))], "CHANGED"),
        ([PLAIN], [SPILLING], "SPILLS"),
        ([SPILLING], [OTHER], "CHANGED"),
        ([SPILLING], [replace(SPILLING, stack_bytes=16, code_hash="g")], "SPILLS"),
        ([WGMMA], [MMA], "LOST TENSOR CORES"),
        ([MMA], [replace(MMA, tensor_path="none", code_hash="g")], "LOST TENSOR CORES"),
        ([MMA], [WGMMA], "CHANGED"),
        ([WGMMA], [replace(MMA, stack_bytes=8)], "LOST TENSOR CORES"),
        # In another order, or another number: split in two, joined to one.
        ([WGMMA, PLAIN], [PLAIN, WGMMA], "SAME"),
        ([WGMMA, PLAIN], [OTHER, MMA], "LOST TENSOR CORES"),
        ([WGMMA], [WGMMA, replace(REDUCE, stack_bytes=8)], "SPILLS"),
        ([WGMMA, replace(REDUCE, stack_bytes=8)], [WGMMA], "CHANGED"),
        ([WGMMA, REDUCE], [REDUCE], "LOST TENSOR CORES"),
        # What did not compile.
        ([PLAIN], BROKEN, "DOES NOT COMPILE"),
        (BROKEN, BROKEN, "DOES NOT COMPILE"),
        (BROKEN, [PLAIN], "FIXED"),
        (REFUSED, [PLAIN], "NOT COMPARED"),
    ],
)
def test_verdicts(before, now, wanted):
    assert changed(IDENTITY, before, now).verdict == wanted


def test_what_only_one_side_has():
    assert new(IDENTITY, [SPILLING]).verdict == "NEW" and "spills 8 bytes" in new(IDENTITY, [SPILLING]).sentences[0]
    assert new(IDENTITY, BROKEN).verdict == "DOES NOT COMPILE" and new(IDENTITY, REFUSED).verdict == "NOT COMPARED"


def test_exit_status():
    went, unknown = (
        CodeChange(*IDENTITY, "GONE", ("it went",)),
        new(IDENTITY, CompileFailure("not for this", refused=True)),
    )
    fine = [changed(IDENTITY, before, [PLAIN]) for before in ([PLAIN], [OTHER], CompileFailure("it broke"))]
    fine.append(new(IDENTITY, [PLAIN]))
    for before, now in (([PLAIN], [SPILLING]), ([WGMMA], [MMA]), ([PLAIN], CompileFailure("it broke"))):
        assert exit_status([changed(IDENTITY, before, now), went, *fine]) == 11
    assert exit_status([went, *fine]) == exit_status([unknown]) == 13 == exit_status([]), "nothing compared is no pass"
    assert exit_status([unknown, *fine]) == 0


def test_an_option_that_lost_or_found_its_effect_is_told():
    ignored = Option("warp specialization", False, "it was asked for and ignored")
    works = replace(ignored, took_effect=True, sentence="it was asked for and is there")
    lost = changed(IDENTITY, [replace(PLAIN, options=(works,))], [replace(OTHER, options=(ignored,))])
    assert lost.verdict == "CHANGED" and "it was asked for and ignored" in lost.sentences
    found = changed(IDENTITY, [replace(PLAIN, options=(ignored,))], [replace(OTHER, options=(works,))])
    assert "warp specialization takes effect now" in found.sentences
    still = changed(IDENTITY, [replace(PLAIN, options=(ignored,))], [replace(OTHER, options=(ignored,))])
    assert still.sentences == ("the code differs in nothing counted",)
    assert changed(IDENTITY, [PLAIN], [replace(OTHER, registers=64)]).sentences == ("registers 40 -> 64",)


def test_markdown_is_one_table():
    changes = [
        changed(IDENTITY, [PLAIN], [OTHER]),
        CodeChange(*IDENTITY, "GONE", ("a | *b*\nc",)),
        changed(IDENTITY, [PLAIN], [PLAIN]),
    ]
    text = markdown(changes, "main")
    assert "| GONE | gemm/tiled | bf16 | `M=64` | a \\| \\*b\\* c |" in text and text.count("gemm/tiled") == 2
    assert summary_line(changes[2:], "main").startswith("compiled code against main: passes (0); 1 compared")
    assert "|" not in markdown(changes[2:], "main"), "nothing to tell"


def test_of_several_cases_each_is_paired_with_itself():
    cases = {"M": 1}, {"M": 1, "bias": True}, {"M": 2}
    items = [{"op": "gemm", "kernel": "tiled", "scheme": "fp8", "case": case} for case in cases]
    tree = SimpleNamespace(label="a tree", select=lambda query: items)
    assert matched(tree, tree, Query()) == [(item, item) for item in items]
