"""Errors that the tolerance of every product rejects: a missing term of the sum over k, at each tile edge where the
adversarial inputs have them; and the adversarial inputs of other ops."""

from typing import Any

import pytest
import torch
from op_kernels import CPU

from rooflab.kernels.registry import get_op
from rooflab.reference.spec import SCHEMES, Case

FLOATS = ("fp32", "fp16", "bf16")
TILES = [0, 15, 16, 63, 64, 127, 128]
WITH_HALF_TILES = [0, 15, 16, 31, 32, 63, 64, 127, 128]
PLANTED = [
    *(("gemm", "M=8,N=8,K=130,layout=NN,bias=false", scheme, [*TILES, 129]) for scheme in FLOATS),
    *(("gemm_grouped", "T=40,top_k=1,E=3,N=8,K=130,skew=0.0", scheme, [*TILES, 129]) for scheme in FLOATS),
    *(("gemm_silu_and_mul", "M=8,I=8,K=130,layout=NT", scheme, [*TILES, 129]) for scheme in FLOATS),
    ("gemm_w8a16", "M=8,N=8,K=144,bias=false", "w8a16", [*WITH_HALF_TILES, 143]),
    *(
        (
            "gemm_w4a16",
            f"M=8,N=8,K=208,zeros={zeros},bias=false",
            "w4a16_g32",
            [0, 1, 7, 31, 32, 63, 64, 127, 128, 191, 192, 207],
        )
        for zeros in ("false", "true")
    ),
    *(
        ("gemm_fp8", f"M=8,N=8,K=272,scales={scales},bias=false", "fp8_e4m3", [*WITH_HALF_TILES, 271])
        for scales in ("tensor", "block")
    ),
]


@pytest.mark.parametrize(("op", "case", "scheme", "edges"), PLANTED)
def test_a_dropped_k_is_rejected_at_every_planted_edge(op, case, scheme, edges):
    spec, seen = get_op(op), []
    for label, inputs in spec.planted(Case.parse(case), SCHEMES[scheme], CPU, 0):
        if label.startswith("k="):
            a = inputs["a"].clone()
            a[:, int(label.removeprefix("k="))] = 0.0
            (stats,) = spec.judge(spec.oracle({**inputs, "a": a}), spec.oracle(inputs), inputs, SCHEMES[scheme])
            assert not stats.passed, label
            assert op != "gemm_silu_and_mul" or stats.mismatched > stats.total / 2
            seen.append(int(label.removeprefix("k=")))
    assert seen == edges


def planted(op: str, case: str, seed: int = 0) -> dict[str, dict[str, Any]]:
    return dict(get_op(op).planted(Case.parse(case), SCHEMES["fp32"], CPU, seed))


def test_planted_sets_are_what_their_labels_say():
    norms = planted("fused_add_rmsnorm", "T=2,H=4096,eps=1e-06")
    for inputs in (norms["x column=0"], norms["residual column=0"]):
        squares = (inputs["x"] + inputs["residual"]) ** 2
        assert (squares[:, 0] > 0.9 * squares.sum(1)).all(), "most of the mean square"
    paged = "B=2,context=64,H=1,H_kv=1,D=8,block_size=4,ragged=true,lognormal=true"
    for seed in (0, 4):  # either sequence is the longer one
        pages = planted("paged_attention", paged, seed)
        shared = pages["a prefix that two sequences share"]
        assert get_op("paged_attention").oracle(shared) and shared["block_table"][:, 0].unique().numel() == 1
    drafts = planted("speculative_verify", "B=9,K=4,V=20")["uneven rows: drafts behind the last are padding"]
    assert torch.equal((drafts["draft_tokens"] >= 0).sum(1), drafts["num_drafts"])
    assert torch.equal(drafts["draft_probs"].isfinite().all(2).sum(1), drafts["num_drafts"])
    for size in (2, 300):
        draws = planted("sample", f"B=2,V={size},temperature=1.0,top_k=0,top_p=1.0,min_p=0.0")
        assert draws["all logits below -10,000"]["logits"].max() < -10_000
        assert draws["a penalty, a bias and a mask decide"]["top_n"] <= min(20, size), "what an API gives at most"


COUNTS = torch.arange(7, dtype=torch.int32)
PAGED, VARLEN = "uneven rows: as many queries as sequences", "uneven rows: as many queries as keys and sequences"
MISREAD = [
    ("paged_attention", PAGED, lambda of: {"cu_seqlens_q": COUNTS}),
    ("flash_attention_varlen", VARLEN, lambda of: {"cu_seqlens_k": of["cu_seqlens_q"]}),
    ("flash_attention_varlen", VARLEN, lambda of: {"cu_seqlens_q": COUNTS, "cu_seqlens_k": COUNTS}),
    *(
        (op, "values: an offset plus half a unit", lambda of: {"weight": of["weight"] + 1, "weight_offset": 0.0})
        for op in ("rmsnorm", "fused_add_rmsnorm")
    ),
]
"""Offsets that equal totals make a kernel leave out, and 1 + weight rounded to the dtype of the weight."""


@pytest.mark.parametrize("scheme", ["fp16", "bf16"])
@pytest.mark.parametrize(("op", "label", "misread"), MISREAD)
def test_a_planted_set_rejects_misread_inputs_and_takes_the_rounded_result(op, label, misread, scheme):
    spec, dtypes = get_op(op), SCHEMES[scheme]
    inputs = dict(spec.planted(spec.cases["smoke"][0], dtypes, CPU, 0))[label]
    right = spec.oracle(inputs)
    for seen, passes in (({}, True), (misread(inputs), False)):
        found = tuple(result.to(dtypes.output) for result in spec.oracle({**inputs, **seen}))
        assert spec.judge(found, right, inputs, dtypes)[0].passed is passes
