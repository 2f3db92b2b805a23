"""Provides facts that launchers need about the GPU, such as the number of SMs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

HOPPER_SMS = 132
"""The number of SMs of an H100 or H200 SXM, the assumed GPU for compilation and emulation without a GPU."""
sm_count_override: int | None = None
"""The number that `sm_count` returns instead of the real number, or None.  A check sets it (`bench/core/trial.py`)."""
is_emulated = False
"""Whether the emulator runs every launch of this process on CPU tensors, as on sm90 (`bench/emulate/ours.py`)."""

counted_device_type: str | None = None
"""The device type for which traffic is counted on `meta` tensors (`kernels/traffic.py`), or None."""


def kind_of(x: torch.Tensor) -> str:
    """Returns the device type of the tensor `x`, such as `cuda`.  While torch calls are only counted, `x` may be a
    `meta` tensor.  Then returns the device type for which they are counted."""
    return counted_device_type or x.device.type


def sm_count(device: torch.device) -> int:
    """Returns the number of SMs of a GPU.  Returns 132, the number of an H100 SXM, for the CPU and `meta`."""
    return sm_count_override or _sm_count(device)


@cache
def _sm_count(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return HOPPER_SMS


def on_its_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `launcher`, so that a call makes the GPU of its first tensor the current GPU. Triton launches on the
    current GPU.

    For tensors on a CPU, this takes 0.4 to 0.7 us of host time. The time with a GPU is not measured."""

    @wraps(launcher)
    def launch(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor):
                if x.is_cuda and x.get_device() != torch.cuda.current_device():
                    with torch.cuda.device(x.device):
                        return launcher(*args, **kwargs)
                break
        return launcher(*args, **kwargs)

    return launch
