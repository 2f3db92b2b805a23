"""TMA in Gluon kernels: tensor maps and their layouts, names of Triton 3.9, and a ring of slots that TMA fills."""

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
"""Copies from global to shared memory; an mbarrier counts the bytes.  The first name is Triton's from 3.9 on."""
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Copies from shared to global memory; `tma.store_wait` waits for the copy."""
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""Returns the same shared memory with another dtype, shape and layout."""

# Making a layout takes 9 us on the host, so each layout is made once.
HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""The layout of 64 columns of 16 bits in four dimensions, as attention loads them."""
PAGES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
"""The layout of 64 columns of 16 bits in five dimensions, as attention loads pages."""


@cache
def layout_of(box: tuple[int, ...], kind: gl.dtype) -> gl.NVMMASharedLayout:
    """Returns the layout with the widest swizzle that a box of this shape and dtype takes."""
    return gl.NVMMASharedLayout.get_default_for(list(box), kind)


def map_maker(kind: Any, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], *layout: Any) -> MapMaker:
    """Returns a maker of Triton's or Gluon's tensor maps for one layout.  The maker skips the checks of the
    constructor, so a map takes 0.5 us on the host, not 2.4.

    The launcher has already refused the cases that these checks would find: addresses and strides that are not whole 16
    bytes, an empty dimension, another layout.
    """

    def made(base: torch.Tensor) -> Any:
        tensor_map: Any = object.__new__(kind)
        tensor_map.base, tensor_map.shape, tensor_map.strides, tensor_map.block_shape = base, shape, strides, box
        if layout:
            (tensor_map.layout,) = layout
        return tensor_map

    return made


@gluon.jit
def advance(slot, phase, ring):
    """Returns the next slot of a ring, and the parity to wait for on its barriers; each round flips the parity."""
    last = slot == ring.shape[0] - 1
    return gl.where(last, 0, slot + 1), phase ^ last.to(gl.int32)


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Makes barriers whose phase is complete after ARRIVALS arrivals and after all announced bytes have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for nth in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(nth), count=ARRIVALS)
    return barriers
