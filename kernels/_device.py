"""What a launcher asks of the GPU that it launches on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

HOPPER_SMS = 132
"""SMs of an H100 or H200 SXM: what a kernel is compiled and emulated for where there is no GPU."""


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; of an H100 SXM for the CPU and `meta`, where kernels run as on one."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return HOPPER_SMS


def on_its_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """`launcher` with its first tensor's GPU as the current one, which is where Triton launches, wherever tensors are.

    Costs the host 0.4 to 0.7 us for tensors on a CPU; with a GPU, which asks for the current one too, unmeasured.
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
