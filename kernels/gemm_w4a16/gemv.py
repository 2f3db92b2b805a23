"""Over naive, for few rows of a: codes go from memory through registers to the tensor core; each is read once.

The product is a stream of packed codes.  A warp keeps four chunks of 1 KB in flight, 16 bytes per lane.  A code becomes
bf16 exactly: its bits are put below a power of two, two codes at a time, and one subtraction follows (Kim et al., arXiv
2211.10017, section 3).  mma.m16n8k16 multiplies 16 rows of the weight with up to 16 columns, so a second row of a costs
nothing.  The sums of each group are fp32 and scaled in fp32, so no weight is rounded.  K is split over the warps of a
CTA, then over a cluster, for one full wave; partial sums meet in distributed shared memory in a fixed order.
"""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.configs import default_config
from rooflab.kernels.gemm_w4a16 import _stream
from rooflab.kernels.gemm_w4a16._operands import group_of, rows_along_k
from rooflab.kernels.gemm_w4a16._packed import check_packed, pack
from rooflab.kernels.gemm_w4a16._stream import MOST_COLUMNS, MOST_M, Config
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

BITS = 4
CHUNK_K = 128
"""Values along K that a quad of lanes holds at once."""


def subgroups(group: int) -> int:
    """Groups that a quad holds at once."""
    return CHUNK_K // group


def _subgroups(scheme: Scheme) -> int:
    return subgroups(scheme.group or CHUNK_K)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Every way to divide the weight."""
    return _stream.all_configs()


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers and shared memory of a CTA."""
    return _stream.footprint(config, case, BITS, _subgroups(scheme))


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """See `_stream.is_legal`."""
    return _stream.is_legal(config, case, BITS, _subgroups(scheme))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """One wave of warps."""
    return _stream.heuristic(case, BITS, _subgroups(scheme))


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once: L1 and L2 keep a between the warps that read it, and sums stay in the cluster."""
    a, b = inputs.a, inputs.b
    return Traffic(
        read_bytes=nbytes(a, b, inputs.scale, inputs.zero, inputs.bias),
        write_bytes=a.shape[0] * b.shape[0] * a.element_size(),
    )


def why_not_taken(a: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> str | None:
    """Why this kernel cannot take the operands, or None."""
    M, K = a.shape
    most = min(MOST_M, MOST_COLUMNS // subgroups(group_of(K, scale.shape[1]) if K else CHUNK_K))
    if M > most:
        return f"a: expected up to {most} rows in groups of this size, got {M}; gemm_w4a16/dequant_dot takes more"
    for name, tensor in (("scale", scale), ("zero", zero)):
        if tensor is not None and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            return f"{name}: expected stride 1 along groups, got strides {tensor.stride()}; gemm_w4a16/naive takes any"
    if zero is not None and zero.shape[0] > 1 and zero.stride(0) != scale.stride(0):
        return f"zero: expected the strides of scale, got {zero.stride()}; gemm_w4a16/naive takes any"
    return rows_along_k(a)


@register(
    op="gemm_w4a16", name="gemv", role="optimized", backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",),
    prepare=pack, traffic=traffic, unsupported=lambda inputs: why_not_taken(inputs.a, inputs.scale, inputs.zero),
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def gemm_w4a16(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """a W + bias, W = (code - zero) scale, for at most eight rows of a (four in groups of 32); bit-for-bit repeatable.

    a: (M, K) bf16, stride 1 along K; b: from `pack`; scale: (N, ceil(K / group)) fp32, fp16 or bf16; zero: uint8 of the
    same layout, or None for 8; bias: (N,) bf16; returns (M, N) bf16.  Raises `ValueError` on other operands.
    """
    M, N, K, group = check_packed(a, b, scale, zero, bias)
    reason = why_not_taken(a, scale, zero)
    if reason:
        raise ValueError(reason)
    out = output(out, (M, N), a)
    if not out.numel():
        return out
    if config is None:
        dims = {"M": M, "N": N, "K": K, "zeros": zero is not None}
        config = default_config("gemm_w4a16", "gemv", f"w4a16_g{group}", a.device, **dims)
    _stream.launch(config, a, b, scale, zero, bias, out, bits=BITS, subgroups=subgroups(group))
    return out
