"""What a launcher asks of the GPU that it launches on."""

from __future__ import annotations

from functools import cache

import torch

HOPPER_SMS = 132
"""SMs of an H100 or H200 SXM: what a kernel is compiled and emulated for where there is no GPU."""


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; of an H100 SXM for the CPU and `meta`, where kernels run as on one."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return HOPPER_SMS
