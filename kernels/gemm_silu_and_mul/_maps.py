"""Provides host helpers for gemm_silu_and_mul's kernels: memory traffic, TMA maps, and checks of the operands."""

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
    """Computes launch arguments from shapes, strides and options: sizes, and functions for TMA maps."""
    config = of.config
    (a, weight), out = stored_operands(of.a, of.b), stored_output(of.out)
    half_rows = weight.rows // 2
    map_shape, strides = [2, half_rows, weight.columns], [half_rows * weight.stride, weight.stride, 1]
    gate_up_map = map_maker(TensorDescriptor, map_shape, strides, [2, config.block_i, config.block_k])
    tensor_maps = a.map(config.block_m, config.block_k), gate_up_map, out.map(config.block_m, config.block_i)
    return *tensor_maps, (a.rows, half_rows, weight.columns)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of `a` and the result once.  Counts `b` once per group of `group_m` rows of tiles."""
    a, b, config = inputs.a, inputs.b, inputs.config
    M = a.shape[0]
    b_read_count = cdiv(M, config.block_m * config.group_m)
    return Traffic(nbytes(a) + b_read_count * nbytes(b), M * (b.shape[1] // 2) * a.element_size())
