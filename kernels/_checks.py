"""Whether launchers read the values of integer tensors, to check them."""

from __future__ import annotations

import os

import torch

from rooflab.kernels import _device

CHECK_VALUES = os.environ.get("ROOFLAB_CHECK_VALUES") == "1"
"""Whether launchers check the values in page tables, slots, positions, offsets and token ids.  A check waits for the
device, so it is off by default; it does not work while a CUDA graph is captured."""


def checks_values(tensor: torch.Tensor) -> bool:
    """Returns whether a launcher reads the values of `tensor`, to check them; never while torch's calls are counted."""
    return CHECK_VALUES and not tensor.is_meta and _device.counted is None


def checks_bounds(bounds: torch.Tensor) -> bool:
    """Returns whether a launcher reads lengths, offsets or a table, to check them: always on a CPU, where the check
    costs little and a wrong value may end the process."""
    return (bounds.device.type == "cpu" and _device.counted is None) or checks_values(bounds)
