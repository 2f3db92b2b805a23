"""Defines the conditions for a TMA tensor map, such as the alignment of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MapMaker = Callable[[torch.Tensor], Any]
"""A function that makes the tensor maps of tensors of one layout: `map_maker` of `lib/tma.py`."""

ALIGNMENT = 16
"""A tensor map's address and strides must be multiples of this many bytes (CUDA driver API, cuTensorMapEncodeTiled)."""
STRIDE_LIMIT = 2**40
"""The bound of a tensor map's strides: each stride is smaller than this many bytes (same source)."""
BARRIER_BYTES = 8
"""The size of an mbarrier in bytes; each stage of a ring buffer that TMA fills has at least one."""


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's first element.  For a meta tensor, returns its byte offset in the storage."""
    if tensor.device.type == "meta":
        return int(tensor.storage_offset()) * tensor.element_size()
    return int(tensor.data_ptr())
