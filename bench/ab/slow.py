"""The injected regression of a self-test: work added to a call, as a share of the call's own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

PROBES = 7


def slowed(function: Callable[[], object], share: float, device: torch.device) -> Callable[[], object]:
    """`function` followed by a wait of `share` of its time: spinning on a CPU, on the device with CUDA."""
    if device.type == "cuda":
        return _slowed_on_device(function, share)

    def spin() -> object:
        # Of this very call, so that a call that finds its data in a cache is not slowed like one that does not.
        began = time.perf_counter()
        result = function()
        ended = time.perf_counter()
        until = ended + share * (ended - began)
        while time.perf_counter() < until:
            pass
        return result

    return spin


def _slowed_on_device(function: Callable[[], object], share: float) -> Callable[[], object]:
    cuda: Any = torch.cuda  # torch leaves events and `_sleep` without annotations
    times = []
    for _ in range(PROBES):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(1_000_000)  # the launch hides behind it
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    cycles = int(sorted(times)[PROBES // 2] * share * 10_000_000 / start.elapsed_time(end))

    def wait() -> object:
        result = function()
        cuda._sleep(cycles)
        return result

    return wait
