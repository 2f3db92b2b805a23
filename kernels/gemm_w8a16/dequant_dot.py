"""Over naive, for many rows of a: codes become bf16 in registers, between their load and the tensor core.

One launch instead of four, and the weight crosses HBM once, at one byte per value.  cp.async copies codes to shared
memory several tiles ahead; wgmma multiplies them from registers, with up to 128 rows of a from shared memory.  Sums are
fp32 and scaled once at the end, so no weight is rounded.  K is split if there are too few tiles.
"""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.configs import default_config
from rooflab.kernels.gemm_w4a16 import _dot
from rooflab.kernels.gemm_w4a16._dot import BLOCK_K8, Config
from rooflab.kernels.gemm_w8a16._operands import rows_along_k
from rooflab.kernels.gemm_w8a16._packed import check_packed, pack
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

BITS = 8


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """All tiles."""
    return _dot.all_configs()


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers and shared memory of a CTA."""
    return _dot.footprint(config, case, BITS, BLOCK_K8)


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """See `_dot.is_legal`."""
    return _dot.is_legal(config, case, BITS, BLOCK_K8)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By the rows of a, with as many shares of K as fill the GPU."""
    return _dot.heuristic(case, BITS, BLOCK_K8)


def traffic(inputs: Arguments) -> Traffic:
    """a once; the weight once per tile of rows without reuse from L2; sums of shares of K, written and read."""
    a, scale = inputs.a, inputs.scale
    (M, K), N = a.shape, scale.shape[0]
    config = inputs.config or default_config("gemm_w8a16", "dequant_dot", "w8a16", a.device, M=M, N=N, K=K)
    tiles_m = -(-M // config.block_m)
    shared = 4 * config.split * M * N if config.split > 1 else 0
    return Traffic(
        read_bytes=nbytes(a, inputs.bias) + max(tiles_m, 1) * nbytes(inputs.b, scale) + shared,
        write_bytes=shared + M * N * a.element_size(),
        launches=1 if config.split == 1 else 2,
    )


def why_not_taken(a: torch.Tensor) -> str | None:
    """Why the kernel does not read this layout, or None."""
    return rows_along_k(a)


@register(
    op="gemm_w8a16", name="dequant_dot", role="optimized", backend="triton", min_sm=90, prepare=pack, traffic=traffic,
    unsupported=lambda inputs: why_not_taken(inputs.a),
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal), fenced_since="3.7",
)  # fmt: skip
def gemm_w8a16(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """a (scale b) + bias on the tensor cores; two runs agree bit for bit.

    a: (M, K) bf16, stride 1 along K; b: from `pack`; scale: (N,) fp32, fp16 or bf16; bias: (N,) bf16; returns (M, N)
    bf16.  Raises `ValueError` on other operands.
    """
    M, N, K = check_packed(a, b, scale, bias)
    reason = why_not_taken(a)
    if reason:
        raise ValueError(reason)
    out = output(out, (M, N), a)
    if out.numel():
        config = config or default_config("gemm_w8a16", "dequant_dot", "w8a16", a.device, M=M, N=N, K=K)
        _dot.launch(config, a, b, scale, None, bias, out, bits=BITS, block_k=BLOCK_K8)
    return out
