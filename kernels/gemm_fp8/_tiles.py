"""What the TMA kernels share: traffic, checks and maps."""

from __future__ import annotations

from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import map_maker
from rooflab.kernels.gemm_fp8._configs import BLOCK_K
from rooflab.kernels.gemm_fp8._operands import block_scaled, why_no_tma
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """a once, b once per group of row panels without reuse from L2."""
    a, b, config = inputs.a, inputs.b, inputs.config
    M, N = a.shape[0], b.shape[1]
    panels = max(1, cdiv(M, config.block_m * config.group_m))
    return Traffic(nbytes(a, inputs.a_scale, inputs.b_scale, inputs.bias) + panels * nbytes(b), 2 * M * N)


def unsupported(inputs: Arguments) -> str | None:
    """Why TMA cannot read these operands, or None; None for empty ones, which no kernel reads."""
    a, b = inputs.a, inputs.b
    return why_no_tma(a, b) if a.numel() and b.numel() else None


def by_maps(of: Arguments) -> Any:
    """Of a layout: what makes the maps of a and b.mT, the grid, sizes and strides."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    a_map = map_maker(TensorDescriptor, [M, K], [of.a.stride(0), 1], [config.block_m, BLOCK_K])
    b_map = map_maker(TensorDescriptor, [N, K], [of.b.stride(1), 1], [config.block_n, BLOCK_K])
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n),)
    return a_map, b_map, grid, (M, N, K), scale_strides(of), of.c.stride(0)


def scale_strides(of: Arguments) -> tuple[int, ...]:
    """The strides of both block scales; zeros for one scale each."""
    return (*of.a_scale.stride(), *of.b_scale.stride()) if block_scaled(of.a_scale) else (0, 0, 0, 0)
