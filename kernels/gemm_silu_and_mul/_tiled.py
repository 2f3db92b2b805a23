"""What the tiled kernels of gemm_silu_and_mul share: the activation, and the traffic of a launch.

A tile of B has columns of gate and the same columns of up, so one product gives both: a warpgroup's instruction reads
its rows of A once for 256 columns.  In a tensor core's accumulator a thread holds both values of each place, so
separating the halves moves no data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels._sizes import cdiv
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """a once, b once per group of row panels without reuse from L2, and the result."""
    a, b, config = inputs.a, inputs.b, inputs.config
    M = a.shape[0]
    panels = cdiv(M, config.block_m * config.group_m)
    return Traffic(nbytes(a) + panels * nbytes(b), M * (b.shape[1] // 2) * a.element_size())


@triton.jit
def silu_product(tile):
    """silu of a tile's left half times its right half, in fp32."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    gate, up = tl.split(tl.permute(tl.reshape(tile, (rows, 2, half)), (0, 2, 1)))
    decay = tl.exp(-tl.abs(gate))  # exp(-|gate|) cannot overflow
    return tl.where(gate >= 0.0, gate, gate * decay) / (1.0 + decay) * up
