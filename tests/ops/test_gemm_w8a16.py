"""gemm_w8a16: torch's limits, the rung of a CPU, refusals, traffic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, META
from shown import calls

from rooflab.kernels._torch_cpu import why_not_padded_rows
from rooflab.kernels.gemm_w8a16 import library, packed
from rooflab.kernels.registry import get_kernel, kernels
from rooflab.reference.gemm_w8a16 import SPEC
from rooflab.reference.quantization import dequantize_int8
from rooflab.reference.spec import SCHEMES, Case

SCHEME = SCHEMES["w8a16"]
RUNGS = [kernel for kernel in kernels("gemm_w8a16").values() if kernel.min_sm == 90]
PACKED = get_kernel("gemm_w8a16", "packed")
ONEDNN = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def inputs_of(**changes: bool | int) -> dict[str, torch.Tensor | None]:
    return SPEC.make_inputs(Case(M=4, N=32, K=64, bias=False).but(**changes), SCHEME, CPU, 0)


def test_the_library_refuses_what_torch_reads_past() -> None:
    """torch 2.13 on a CPU reads whole vectors of 16 codes with aligned loads, and gives wrong values without a word."""
    kernel = get_kernel("gemm_w8a16", "library")
    assert kernel.why_not_args(inputs_of()) is None
    assert "K in multiples of 16" in str(kernel.why_not_args(inputs_of(K=56)))
    assert "bias" in str(kernel.why_not_args(inputs_of(bias=True)))
    inputs = inputs_of()
    shifted = torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64)
    assert "a multiple of 32 bytes" in str(kernel.why_not_args({**inputs, "a": shifted}))
    assert "scale of the activation's dtype" in str(kernel.why_not_args({**inputs, "scale": inputs["scale"].float()}))


def test_the_library_refuses_what_torch_counts_past() -> None:
    """torch's CUDA kernel multiplies row and length in 32 bits."""
    large = Case(M=1, N=2**17, K=2**14, bias=False)
    inputs = SPEC.make_inputs(large, SCHEME, META, 0)
    device = SimpleNamespace(type="cuda")
    on_cuda = {
        name: SimpleNamespace(
            device=device, shape=tensor.shape, dtype=tensor.dtype, numel=tensor.numel,
            is_contiguous=tensor.is_contiguous, mT=tensor.mT if tensor.ndim > 1 else None,
        )
        for name, tensor in inputs.items()
        if tensor is not None
    }  # fmt: skip
    assert "fewer than 2**31" in library.why_not_taken(**on_cuda, bias=None)
    on_cuda["b"].numel = lambda: 2**31 - 1
    assert library.why_not_taken(**on_cuda, bias=None) is None


@pytest.mark.parametrize(("M", "K"), [(0, 33), (1, 1), (4, 64), (16, 33), (17, 64), (40, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_takes_every_size_and_layout(M: int, K: int, bias: bool) -> None:
    """Rows of another length, views into wider buffers whose rest is NaN, scales of every dtype, and blocks in part."""
    inputs = inputs_of(M=M, N=37, K=K, bias=bias)
    oracle = SPEC.oracle(inputs)
    wide = torch.full((M + 1, K + 3), torch.nan, dtype=torch.bfloat16)
    wide[:M, 1 : K + 1] = inputs["a"]
    for a in (inputs["a"], wide[:M, 1 : K + 1], inputs["a"].mT.contiguous().mT):
        for b in (PACKED.prepare(inputs["b"]), inputs["b"].contiguous()):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                given = {**inputs, "a": a, "b": b, "scale": inputs["scale"].to(dtype)}
                many = not packed._few(a, b, given["scale"], given["bias"])
                if (why_not_padded_rows(a) or (many and not ONEDNN)) and PACKED.why_not_args(given):
                    continue  # torch computes this layout wrongly on this CPU, or many rows not at all
                found = PACKED(**given)
                assert SPEC.judge((found,), oracle, inputs, SCHEME)[0].passed


@pytest.mark.skipif(not ONEDNN, reason="oneDNN does not multiply bf16 on this CPU")
def test_packed_goes_by_blocks_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, of which the last is in part; without a bias no weight is rounded."""
    monkeypatch.setattr(packed, "BLOCK_VALUES", 2**12)
    for bias in (False, True):
        inputs = inputs_of(M=24, N=250, K=128, bias=bias)
        oracle = SPEC.oracle(inputs)[0]
        out = torch.full((24, 260), 7.0, dtype=torch.bfloat16)
        found = PACKED(**{**inputs, "b": PACKED.prepare(inputs["b"])}, out=out[:, 5:255])
        assert SPEC.judge((found,), (oracle,), inputs, SCHEME)[0].passed and int((out == 7).sum()) >= 24 * 10
        if not bias:
            walk = inputs["a"].double().abs() @ dequantize_int8(inputs["b"].mT, inputs["scale"]).abs().mT
            assert ((found.double() - oracle).abs() <= 4 * 2.0**-24 * 128**0.5 * walk + 2.0**-8 * oracle.abs()).all()
    empty = inputs_of(M=3, K=0, bias=True)
    assert torch.equal(PACKED(**empty), empty["bias"].expand(3, 32))


def test_packing_copies_only_what_lies_otherwise() -> None:
    b = inputs_of()["b"]
    assert packed.pack(b).data_ptr() == b.data_ptr() and packed.pack(b.to("meta")).is_meta
    odd = torch.zeros(32 * 64 + 1, dtype=torch.int8)[1:].view(32, 64).mT
    assert packed.pack(odd).data_ptr() % 16 == 0 and packed.pack(b.contiguous()).mT.is_contiguous()
    with pytest.raises(ValueError, match="b: expected torch.int8, got torch.float32"):
        packed.pack(torch.ones(2, 3))


@pytest.mark.skipif(not ONEDNN, reason="oneDNN does not multiply bf16 on this CPU")
def test_packed_multiplies_many_rows_block_by_block_and_few_as_the_library_does():
    many, few = (calls("gemm_w8a16", f"M={M},N=256,K=4096,bias=false", "packed").names for M in (64, 4))
    products = [sum(names[name] for name in names if "_linear_pointwise" in name) for names in (many, few)]
    assert products == [2, 0] and (many["_weight_int8pack_mm"], few["_weight_int8pack_mm"]) == (0, 1)
