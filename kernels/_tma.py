"""What a tensor map requires of memory, the same for every op."""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes of which a tensor map's address and strides are multiples (CUDA driver API, cuTensorMapEncodeTiled)."""
STRIDE_LIMIT = 2**40
"""Bytes that a stride stays below (the same)."""
BARRIER_BYTES = 8
"""An mbarrier's, of which every stage of a ring that TMA fills has one at least."""


def address_of(tensor: torch.Tensor) -> int:
    """The address of the first element; of a meta tensor, in storage that starts at 0."""
    if tensor.device.type == "meta":
        return int(tensor.storage_offset()) * tensor.element_size()
    return int(tensor.data_ptr())
