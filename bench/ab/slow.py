"""The injected regression of a self-test: work added to a call, as a share of the call's own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rooflab.bench.calls.calls import Rotation

PROBES = 7
PROBE_CYCLES = 10_000_000


class Slowed(Rotation):
    """A rotation each of whose calls is followed by a wait of `share` of its time: spinning on a CPU, on the device
    with CUDA."""

    def __init__(self, rotation: Rotation, share: float, device: torch.device):
        self.__dict__ |= vars(rotation)
        self._share = share
        self._cycles = share * _cycles(rotation) if device.type == "cuda" else None

    @property
    def first(self) -> Callable[[], Any]:
        """The call on the first set, with its wait: what is observed must be what was timed."""
        return partial(self._later, super().first)

    def __call__(self) -> Any:
        """The next call's result, later."""
        return self._later(super().__call__)

    def _later(self, call: Callable[[], Any]) -> Any:
        if self._cycles is not None:
            result = call()
            _cuda._sleep(int(self._cycles))
            return result
        # Of this very call, so that a call that finds its data in a cache is not slowed like one that does not.
        began = time.perf_counter()
        result = call()
        ended = time.perf_counter()
        until = ended + self._share * (ended - began)
        while time.perf_counter() < until:
            pass
        return result


_cuda: Any = torch.cuda
"""Untyped, because torch leaves events and `_sleep` without annotations."""


def _cycles(function: Callable[[], object]) -> float:
    """The device's cycles that a call takes, of the clock that `torch.cuda._sleep` counts."""
    times = sorted(_elapsed_ms(function) for _ in range(PROBES))
    return times[PROBES // 2] * PROBE_CYCLES / _elapsed_ms(lambda: _cuda._sleep(PROBE_CYCLES))


def _elapsed_ms(function: Callable[[], object]) -> float:
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    _cuda._sleep(1_000_000)  # the launch hides behind it
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
