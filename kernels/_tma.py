"""What a TMA tensor map requires of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

Map = TypeVar("Map")
MapMaker = Callable[[torch.Tensor], Any]

ALIGNMENT = 16
"""The address and the strides of a tensor map are multiples of this many bytes (CUDA driver API,
cuTensorMapEncodeTiled)."""
STRIDE_LIMIT = 2**40
"""Strides are smaller than this many bytes (same source)."""
BARRIER_BYTES = 8
"""Size of an mbarrier; each stage of a ring buffer that TMA fills has at least one."""


def address_of(tensor: torch.Tensor) -> int:
    """The address of the first element; for a meta tensor the offset in its storage."""
    if tensor.device.type == "meta":
        return int(tensor.storage_offset()) * tensor.element_size()
    return int(tensor.data_ptr())


def unchecked_map(
    kind: type[Map], base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], *layout: Any
) -> Map:
    """A tensor map of Triton's or Gluon's kind without its constructor's checks: 0.5 us on the host, not 2.4.

    The launcher has refused, with a sentence, what they would assert: addresses and strides that are not whole 16
    bytes, an empty dimension, another layout.
    """
    made: Any = object.__new__(kind)
    made.base, made.shape, made.strides, made.block_shape = base, shape, strides, box
    if layout:
        (made.layout,) = layout
    return cast(Map, made)


def map_maker(kind: Any, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], *layout: Any) -> MapMaker:
    """`unchecked_map` of tensors of one layout: what a launcher keeps for it."""
    return lambda base: unchecked_map(kind, base, shape, strides, box, *layout)
