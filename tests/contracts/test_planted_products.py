"""What the tolerance of every product rejects: one of its k left out, at each edge of a tile that the inputs plant."""

import pytest
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
        ("gemm_w4a16", f"M=8,N=8,K=208,zeros={zeros},bias=false", "w4a16_g32",
         [0, 1, 7, 31, 32, 63, 64, 127, 128, 191, 192, 207])
        for zeros in ("false", "true")
    ),
    *(
        ("gemm_fp8", f"M=8,N=8,K=272,scales={scales},bias=false", "fp8_e4m3", [*WITH_HALF_TILES, 271])
        for scales in ("tensor", "block")
    ),
]  # fmt: skip


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
