"""Holds helpers for TMA in Gluon kernels: tensor maps, layouts, functions renamed in Triton 3.9, barrier rings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from rooflab.kernels._tma import MapMaker

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copies from global to shared memory.  An mbarrier counts the bytes.  Triton has these three names since 3.9."""
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Copies from shared to global memory.  `tma.store_wait` waits for the copy."""
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""Returns the same shared memory with another dtype, shape and layout."""

# Making a layout takes 9 us on the host, so each layout is made once.
HEADS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""The layout of a box of 64 columns of 16 bits in four dimensions.  Attention loads heads with this layout."""
PAGES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
"""The layout of a box of 64 columns of 16 bits in five dimensions.  Attention loads pages with this layout."""


@cache
def layout_of(box: tuple[int, ...], kind: gl.dtype) -> gl.NVMMASharedLayout:
    """Returns the layout with the widest swizzle that a box of this shape and dtype allows."""
    return gl.NVMMASharedLayout.get_default_for(list(box), kind)


def map_maker(kind: Any, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], *layout: Any) -> MapMaker:
    """Returns a function that makes tensor maps for tensors of one layout.  `kind` is Triton's or Gluon's class of
    maps.

    The function skips the checks of this class, so a map takes 0.5 us on the host instead of 2.4 us.  The launcher has
    already made these checks."""

    def made(base: torch.Tensor) -> Any:
        tensor_map: Any = object.__new__(kind)
        tensor_map.base, tensor_map.shape, tensor_map.strides, tensor_map.block_shape = base, shape, strides, box
        if layout:
            (tensor_map.layout,) = layout
        return tensor_map

    return made


@gluon.jit
def advance(slot, phase, ring):
    """Returns the next slot of a ring, and the barrier parity to wait for.  Each round of the ring flips the parity."""
    is_last_slot = slot == ring.shape[0] - 1
    return gl.where(is_last_slot, 0, slot + 1), phase ^ is_last_slot.to(gl.int32)


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Makes `NUMBER` mbarriers.  A barrier completes after `ARRIVALS` arrivals, and after all bytes that it expects."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for barrier_index in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(barrier_index), count=ARRIVALS)
    return barriers
