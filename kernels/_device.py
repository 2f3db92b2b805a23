"""Facts about the GPU on which a launcher launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

HOPPER_SMS = 132
"""The number of SMs of an H100 or H200 SXM, the assumed GPU for compilation and emulation without a GPU."""
few_sms: int | None = None
"""A number of SMs that `sm_count` returns instead of the real number; a check sets it (`bench/core/trial.py`)."""
emulated = False
"""Whether every launch of this process runs in the emulator, on CPU tensors, as on sm90 (`bench/emulate/ours.py`)."""

counted: str | None = None
"""The kind of device for which traffic is being counted on `meta` tensors (`kernels/traffic.py`)."""


def kind_of(x: torch.Tensor) -> str:
    """The kind of device that `x` is on; for a `meta` tensor whose traffic is counted, the kind it stands for."""
    return counted or x.device.type


def sm_count(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors (SMs) of a GPU; 132 (an H100 SXM) for the CPU and `meta`."""
    return few_sms or _sm_count(device)


@cache
def _sm_count(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return HOPPER_SMS


def on_its_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `launcher`: the GPU of its first tensor is the current GPU in a call, because Triton launches on that.

    Host time: 0.4 to 0.7 us for tensors on a CPU; not measured with a GPU, where the current GPU is also looked up.
    """

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
