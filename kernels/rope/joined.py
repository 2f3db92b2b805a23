"""Over naive: q and k are joined along the heads, so that each step is one torch call for both.

For the CPU, where a decode step's time is in the calls and not in the arithmetic.
"""

from __future__ import annotations

import torch

from rooflab.kernels._traffic import steps
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rope._operands import check_operands
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Two gathers, the joining, two products, two fused multiply-adds, the putting together, and casts around them."""
    q, positions = inputs.q, inputs.positions
    angles = 4 * len(positions) * inputs.cos.shape[1]
    values = q.numel() + inputs.k.numel()
    narrow, full, half = q.element_size() * values, 4 * values, 2 * values
    gather = (8 * len(positions) + angles, angles)
    casts = [] if q.dtype == torch.float32 else [(narrow, full), (full, narrow)]
    product, multiply_add = (half + angles, half), (2 * half + angles, half)
    return steps(
        gather,
        gather,
        (narrow, narrow),  # q and k joined
        *casts,
        product,
        multiply_add,
        product,
        multiply_add,
        (full, full),  # the halves put together
    )


@register(op="rope", name="joined", role="optimized", backend="torch", traffic=traffic)
def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by their positions' angles in fp32, together; the results are views of one tensor.

    q: (T, H, D); k: (T, H_kv, D); cos, sin: (max_position, D/2) fp32; positions: (T,) int64; returns q, k. Raises
    `ValueError` on shapes or dtypes that do not fit; a position outside the tables is torch's own error.
    """
    H = check_operands(q, k, cos, sin, positions)[1]
    c = cos[positions].unsqueeze(1)  # (T, 1, D/2)
    s = sin[positions].unsqueeze(1)
    x = torch.cat((q, k), dim=1).float()  # (T, H + H_kv, D)
    if interleaved:
        x1, x2 = x[..., 0::2], x[..., 1::2]
    else:
        x1, x2 = x.chunk(2, dim=-1)
    pair = (torch.addcmul(x1 * c, x2, s, value=-1), torch.addcmul(x2 * c, x1, s))
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    turned = turned.to(q.dtype)
    return turned[:, :H], turned[:, H:]
