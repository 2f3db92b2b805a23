"""Over naive, for many rows of a: codes become bf16 in registers, between their load and the tensor core.

One launch instead of nine, and the weight crosses HBM once, at half a byte per value.  cp.async copies codes to shared
memory several groups ahead; wgmma multiplies them from registers, with up to 128 rows of a from shared memory.  The
sums of each group are fp32 and scaled in fp32, so no weight is rounded.  K is split if there are too few tiles.
"""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.configs import default_config
from rooflab.kernels.gemm_w4a16 import _dot
from rooflab.kernels.gemm_w4a16._dot import Config
from rooflab.kernels.gemm_w4a16._operands import group_of, rows_along_k
from rooflab.kernels.gemm_w4a16._packed import check_packed, pack
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

BITS = 4


def _block_k(scheme: Scheme) -> int:
    return scheme.group or 128


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """All tiles."""
    return _dot.all_configs()


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers and shared memory of a CTA."""
    return _dot.footprint(config, case, BITS, _block_k(scheme))


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """See `_dot.is_legal`."""
    return _dot.is_legal(config, case, BITS, _block_k(scheme))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By the rows of a, with as many shares of K as fill the GPU."""
    return _dot.heuristic(case, BITS, _block_k(scheme))


def traffic(inputs: Arguments) -> Traffic:
    """a once; the weight once per tile of rows without reuse from L2; sums of shares of K, written and read."""
    a, b, scale, zero = inputs.a, inputs.b, inputs.scale, inputs.zero
    M, N = a.shape[0], b.shape[0]
    config = inputs.config or _config(a, scale, zero, N)
    tiles_m = -(-M // config.block_m)
    shared = 4 * config.split * M * N if config.split > 1 else 0
    return Traffic(
        read_bytes=nbytes(a, inputs.bias) + max(tiles_m, 1) * nbytes(b, scale, zero) + shared,
        write_bytes=shared + M * N * a.element_size(),
        launches=1 if config.split == 1 else 2,
    )


def _config(a: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, N: int) -> Config:
    M, K = a.shape
    dims = {"M": M, "N": N, "K": K, "zeros": zero is not None}
    scheme = f"w4a16_g{group_of(K, scale.shape[1])}"
    config: Config = default_config("gemm_w4a16", "dequant_dot", scheme, a.device, **dims)
    return config


def why_not_taken(a: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> str | None:
    """Why the kernel does not read these layouts, or None."""
    for name, tensor in (("scale", scale), ("zero", zero)):
        if tensor is not None and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            return f"{name}: expected stride 1 along groups, got strides {tensor.stride()}; gemm_w4a16/naive takes any"
    if zero is not None and zero.shape[0] > 1 and zero.stride(0) != scale.stride(0):
        return f"zero: expected the strides of scale, got {zero.stride()}; gemm_w4a16/naive takes any"
    return rows_along_k(a)


@register(
    op="gemm_w4a16", name="dequant_dot", role="optimized", backend="triton", min_sm=90, prepare=pack, traffic=traffic,
    unsupported=lambda inputs: why_not_taken(inputs.a, inputs.scale, inputs.zero),
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal), fenced_since="3.7",
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
    """a W + bias, W = (code - zero) scale, on the tensor cores; two runs agree bit for bit.

    a: (M, K) bf16, stride 1 along K; b: from `pack`; scale: (N, ceil(K / group)) fp32, fp16 or bf16; zero: uint8 of the
    same layout, or None for 8; bias: (N,) bf16; returns (M, N) bf16.  Raises `ValueError` on other operands.
    """
    M, N, K, group = check_packed(a, b, scale, zero, bias)
    reason = why_not_taken(a, scale, zero)
    if reason:
        raise ValueError(reason)
    out = output(out, (M, N), a)
    if out.numel():
        config = config or _config(a, scale, zero, N)
        _dot.launch(config, a, b, scale, zero, bias, out, bits=BITS, block_k=group)
    return out
