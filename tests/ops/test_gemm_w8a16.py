"""gemm_w8a16: reads and counts of torch beyond the op's own, and the rung of a CPU."""

from __future__ import annotations

import pytest
import torch
from op_kernels import CPU, assert_right
from shown import calls

from rooflab.kernels.gemm_w8a16 import packed
from rooflab.kernels.registry import get_kernel
from rooflab.reference.gemm_w8a16 import SPEC
from rooflab.reference.quantization import dequantize_int8
from rooflab.reference.spec import SCHEMES, Case

SCHEME = SCHEMES["w8a16"]
PACKED = get_kernel("gemm_w8a16", "packed")
ONEDNN = torch.ops.mkldnn._is_mkldnn_bf16_supported()
NEEDS_ONEDNN = pytest.mark.skipif(not ONEDNN, reason="oneDNN does not multiply bf16 on this CPU")


def inputs_of(**changes: bool | int) -> dict[str, torch.Tensor | None]:
    return SPEC.make_inputs(Case(M=4, N=32, K=64, bias=False).but(**changes), SCHEME, CPU, 0)


def test_the_library_refuses_what_torch_reads_past() -> None:
    """torch 2.13 on a CPU reads whole vectors of 16 codes with aligned loads, and gives wrong values without a word."""
    kernel, inputs = get_kernel("gemm_w8a16", "library"), inputs_of()
    shifted = torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64)
    assert kernel.why_not_args(inputs) is None
    for wrong, words in [
        (inputs_of(K=56), "K in multiples of 16"),
        (inputs_of(bias=True), "bias: expected none"),
        ({**inputs, "a": shifted}, "a multiple of 32 bytes"),
        ({**inputs, "scale": inputs["scale"].float()}, "scale of the activation's dtype"),
    ]:
        assert words in str(kernel.why_not_args(wrong))


@pytest.mark.parametrize(("M", "K"), [(0, 33), (1, 1), (4, 64), (16, 33), (17, 64), (40, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_takes_every_size_and_layout(M: int, K: int, bias: bool) -> None:
    """Rows of another length, views into wider buffers whose rest is NaN, scales of every dtype, and blocks in part."""
    inputs = inputs_of(M=M, N=37, K=K, bias=bias)
    wide = torch.full((M + 1, K + 3), torch.nan, dtype=torch.bfloat16)
    wide[:M, 1 : K + 1] = inputs["a"]
    taken = 0
    for a in (inputs["a"], wide[:M, 1 : K + 1], inputs["a"].mT.contiguous().mT):
        for b in (PACKED.prepare(inputs["b"]), inputs["b"].contiguous()):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                given = {**inputs, "a": a, "b": b, "scale": inputs["scale"].to(dtype)}
                if PACKED.why_not_args(given) is None:  # else torch computes it wrongly on this CPU, or not at all
                    taken += 1
                    assert_right(SPEC, PACKED(**given), inputs, SCHEME)
    assert taken or not ONEDNN


@NEEDS_ONEDNN
@pytest.mark.parametrize("bias", [False, True])
def test_packed_goes_by_blocks_of_channels(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """Several blocks, of which the last is in part; without a bias no weight is rounded."""
    monkeypatch.setattr(packed, "BUFFER_VALUES", 2**12)
    inputs = inputs_of(M=24, N=250, K=128, bias=bias)
    out = torch.full((24, 260), 7.0, dtype=torch.bfloat16)
    found = PACKED(**{**inputs, "b": PACKED.prepare(inputs["b"])}, out=out[:, 5:255])
    assert_right(SPEC, found, inputs, SCHEME)
    assert int((out == 7).sum()) >= 24 * 10
    if not bias:
        (oracle,) = SPEC.oracle(inputs)
        walk = inputs["a"].double().abs() @ dequantize_int8(inputs["b"].mT, inputs["scale"]).abs().mT
        assert ((found.double() - oracle).abs() <= 4 * 2.0**-24 * 128**0.5 * walk + 2.0**-8 * oracle.abs()).all()


@NEEDS_ONEDNN
def test_packed_multiplies_many_rows_block_by_block_and_few_as_the_library_does():
    many, few = (calls("gemm_w8a16", f"M={M},N=256,K=4096,bias=false", "packed").names for M in (64, 4))
    products = [sum(names[name] for name in names if "_linear_pointwise" in name) for names in (many, few)]
    assert products == [2, 0] and (many["_weight_int8pack_mm"], few["_weight_int8pack_mm"]) == (0, 1)
