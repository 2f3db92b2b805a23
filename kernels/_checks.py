"""Decides whether launchers check the values of integer tensors, such as page tables."""

from __future__ import annotations

import os

import torch

from rooflab.kernels import _device

CHECK_VALUES = os.environ.get("ROOFLAB_CHECK_VALUES") == "1"
"""Whether launchers check the values of page tables, slots, positions, offsets and token ids.  Off by default, because
a check waits for the device.  A check does not work while a CUDA graph is captured."""


def checks_values(tensor: torch.Tensor) -> bool:
    """Returns the setting `CHECK_VALUES`, but False for a meta `tensor` and while memory traffic is counted."""
    return CHECK_VALUES and not tensor.is_meta and _device.counted_device_type is None


def checks_bounds(bounds: torch.Tensor) -> bool:
    """Returns whether a launcher checks the values of `bounds` (lengths, offsets or a page table).  On a CPU it does,
    because a wrong value may crash the process, and the check costs little.  On other devices `checks_values` decides.
    While memory traffic is counted, returns False."""
    return (bounds.device.type == "cpu" and _device.counted_device_type is None) or checks_values(bounds)
