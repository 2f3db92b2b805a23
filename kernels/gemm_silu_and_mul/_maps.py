"""Helpers of gemm_silu_and_mul's rungs on the host: traffic, maps for TMA, and the operands that the rungs refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import stored_operands, stored_output, why_not_by_tma
from rooflab.kernels.lib.tma import map_maker
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

why_no_maps = partial(why_not_by_tma, stores=True, gated=True)


def by_maps(of: Arguments) -> Any:
    """Computes for each layout: the makers of the maps of `a`, the weight as (2, I, K) and `out`; sizes."""
    config = of.config
    (a, weight), out = stored_operands(of.a, of.b), stored_output(of.out)
    half = weight.rows // 2
    shape, strides = [2, half, weight.columns], [half * weight.stride, weight.stride, 1]
    both = map_maker(TensorDescriptor, shape, strides, [2, config.block_i, config.block_k])
    maps = a.map(config.block_m, config.block_k), both, out.map(config.block_m, config.block_i)
    return *maps, (a.rows, half, weight.columns)


def traffic(inputs: Arguments) -> Traffic:
    """Counts `a` once, `b` once per group of row panels without reuse from L2, and the result."""
    a, b, config = inputs.a, inputs.b, inputs.config
    M = a.shape[0]
    panels = cdiv(M, config.block_m * config.group_m)
    return Traffic(nbytes(a) + panels * nbytes(b), M * (b.shape[1] // 2) * a.element_size())
