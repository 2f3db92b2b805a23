"""What ping_pong takes of tensor maps."""

from __future__ import annotations

import torch

from rooflab.kernels._tma import ALIGNMENT, STRIDE_LIMIT, address_of
from rooflab.kernels.flash_attention import _launch

nothing_seen = _launch.nothing_seen


def why_not_mapped(name: str, x: torch.Tensor, inner: int = 3, other: str = "masked_tiles") -> str | None:
    """Why a tensor map cannot describe x (B, T, H, D), or None.

    inner: the contiguous dimension; other: a kernel that takes x anyway.
    """
    size, strides, shape = x.element_size(), x.stride(), x.shape
    steps = [strides[dim] * size for dim in range(4) if dim != inner and shape[dim] > 1]
    aligned = address_of(x) % ALIGNMENT == 0
    for step in steps:
        aligned = aligned and step % ALIGNMENT == 0 and 0 < step < STRIDE_LIMIT
    if aligned or not x.numel():
        return None
    return (
        f"{name}: expected an address and strides of whole {ALIGNMENT} bytes for TMA, got address % {ALIGNMENT} = "
        f"{address_of(x) % ALIGNMENT} and strides of {', '.join(map(str, steps))} bytes; "
        f"flash_attention/{other} takes any"
    )
