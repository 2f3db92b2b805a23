"""How much memory a call holds at most, beyond its inputs and what it returns.

On CUDA by torch's allocator, which also serves what Triton asks for.  On a CPU by the allocations that torch's
profiler records, exact to the byte; what a library takes from the system by itself (oneDNN's scratch memory) is not
among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from rooflab.bench.timing.trace import recorded

_cuda: Any = torch.cuda


def peak_memory_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Most bytes that one `call` held at once, less those of what it returned, which is held until they are read."""
    return _on_cuda(call, device) if device.type == "cuda" else _on_cpu(call)


def _on_cuda(call: Callable[[], object], device: torch.device) -> float:
    _cuda.synchronize(device)
    _cuda.reset_peak_memory_stats(device)
    before = _cuda.memory_allocated(device)
    result = call()
    _cuda.synchronize(device)
    peak, after = _cuda.max_memory_allocated(device), _cuda.memory_allocated(device)
    del result
    return float(max(0, peak - max(after, before)))


def _on_cpu(call: Callable[[], object]) -> float:
    with recorded("cpu", memory=True) as trace:
        result = call()
    changes = sorted(
        (event["ts"], int(event["args"]["Bytes"]))
        for event in trace.events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
    )
    del result
    held = list(itertools.accumulate((change for _, change in changes), initial=0))
    return float(max(0, max(held) - max(held[-1], 0)))
