"""Operands that rungs with TMA or 16-byte copies cannot take: other alignments, and some sizes, are refused by name,
and the refusal names a kernel that takes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from op_kernels import META

from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case, Inputs

GEMM = "M=16,N=64,K=64,layout=NT,bias=false,residual=true"
FP8 = "M=16,N=64,K=512,scales=tensor,bias=false,fast_accum=true"
GROUPED = "T=16,top_k=1,E=3,N=32,K=64,skew=0.0"
GATED = "M=16,I=32,K=64,layout=NT"
FLASH = "B=2,T=5,S=9,H=4,H_kv=2,D=64,causal=true"
PAGED = "B=2,context=70,H=4,H_kv=2,D=64,block_size=16,ragged=false"
MAPPED = [
    ("gemm", GEMM, "fp16", "tma persistent warp_specialized", "a b"),
    ("gemm", GEMM, "fp16", "cooperative multicast quack", "a b residual"),
    ("gemm_fp8", FP8, "fp8_e4m3", "fast_accum promoted promoted_ws multicast library", "a b"),
    ("gemm_grouped", GROUPED, "fp16", "tma cooperative", "a b"),
    ("gemm_silu_and_mul", GATED, "bf16", "tma persistent cooperative", "a b"),
    ("flash_attention", FLASH, "fp16", "tma packed_gqa persistent", "k v"),
    ("flash_attention", FLASH, "fp16", "ping_pong tma", "q k v"),
    ("flash_attention", FLASH, "fp8_e4m3", "fp8", "k v"),
    ("paged_attention", PAGED, "bf16", "split_kv tma_pages", "k_cache v_cache"),
]
RUNGS = [
    pytest.param(op, case, scheme, name, operands.split(), id=f"{op}/{name} {scheme} {operands}")
    for op, case, scheme, names, operands in MAPPED
    for name in names.split()
]
OVERLAP = ("gemm/quack", "paged_attention/split_kv", "paged_attention/tma_pages")
"""Rungs that may read rows that overlap."""
HALF, BF16 = torch.float16, torch.bfloat16
STORES = [
    (op, case, scheme, name, torch.empty(shape, dtype=dtype, device=META))
    for op, case, scheme, names, shape, dtype in (
        ("gemm", GEMM, "fp16", "persistent warp_specialized cooperative multicast quack", (16, 64), HALF),
        ("gemm_fp8", FP8, "fp8_e4m3", "multicast", (16, 64), BF16),
        ("gemm_grouped", GROUPED, "fp16", "cooperative", (16, 32), HALF),
        ("gemm_silu_and_mul", GATED, "bf16", "persistent cooperative", (16, 32), BF16),
        ("flash_attention", FLASH, "fp16", "ping_pong", (2, 5, 4, 64), HALF),
    )
    for name in names.split()
]


def made(op: str, case: str, scheme: str) -> Inputs:
    spec = get_op(op)
    return spec.make_inputs(spec.check_case(Case.parse(case)), SCHEMES[scheme], META, 0)


def lying_otherwise(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same shape at an odd address, with rows an odd number of elements apart, and with rows that overlap."""
    order = sorted(range(x.ndim), key=lambda dim: -x.stride(dim))
    back = [order.index(dim) for dim in range(x.ndim)]
    *outer, inner = (x.shape[dim] for dim in order)
    yield torch.empty(x.numel() + 1, dtype=x.dtype, device=META)[1:].view(*outer, inner).permute(back)
    yield torch.empty(*outer, inner + 1, dtype=x.dtype, device=META)[..., :inner].permute(back)
    yield torch.empty(*[1] * len(outer), inner, dtype=x.dtype, device=META).expand(*outer, inner).permute(back)


@pytest.mark.parametrize(("op", "case", "scheme", "name", "operands"), RUNGS)
def test_an_operand_that_lies_otherwise_is_refused_and_taken_by_another(op, case, scheme, name, operands):
    kernel, inputs = get_kernel(op, name), made(op, case, scheme)
    inputs = {argument: value for argument, value in inputs.items() if argument in kernel.accepted}
    assert kernel.why_not_args(inputs) is None
    for operand in operands:
        for x in [*lying_otherwise(inputs[operand])][: 2 if kernel.id in OVERLAP else 3]:
            changed = {**inputs, operand: x}
            reason, _, told = kernel.why_not_args(changed).reason.rpartition("; ")
            assert reason.startswith(f"{kernel.id}: {operand}: "), reason
            assert get_kernel(*told.removesuffix(" takes it").split("/")).why_not_args(changed) is None
            with pytest.raises(ValueError, match=f"{operand}: .* takes it"):
                kernel.fn(**changed)


@pytest.mark.parametrize(("op", "case", "scheme", "name", "out"), STORES)
def test_a_result_that_lies_otherwise_is_refused(op, case, scheme, name, out):
    kernel = get_kernel(op, name)
    inputs = {key: x for key, x in made(op, case, scheme).items() if key in kernel.accepted}
    for x in [*lying_otherwise(out)][:2]:
        with pytest.raises(ValueError, match="out: expected"):
            kernel.fn(**inputs, out=x)
