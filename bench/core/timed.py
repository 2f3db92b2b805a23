"""Times kernels together: a kernel that fails does not lose the other kernels' times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rooflab.bench.core.call import Rotation
from rooflab.bench.core.failed import Failed, failure, known_errors
from rooflab.bench.core.noise import Samples
from rooflab.bench.core.settings import FlushBy
from rooflab.bench.core.timers import Function, Observed
from rooflab.bench.core.timers.timing import observed, time_functions
from rooflab.kernels.registry import interpreting

if TYPE_CHECKING:  # a CPU does without it
    from rooflab.bench.core.timers.card import ClockWatch

INTERPRETED = "on a CPU it runs in Triton's interpreter, whose time is not the kernel's; `rooflab check` emulates it"


def time_together(
    ready: Mapping[str, Function],
    device: torch.device,
    budget_s: float,
    seed: int,
    gpu_uuid: str | None,
    *,
    timer: str | None = None,
    flush: FlushBy = "read",
    renew: Callable[[], None] | None = None,
    patient: bool = False,
) -> tuple[dict[str, Samples], dict[str, Failed], dict[str, Any] | None]:
    """Each kernel's samples, the failures of failed kernels, and the clocks.  `budget_s` is for each kernel;
    `patient` doubles it for kernels with a noisy reading among them.

    If a kernel fails, each kernel is timed alone to find the failed one, and then the rest are timed together.  If
    the rest fail together but each runs alone, the samples taken alone are returned, and their method says so.
    """
    if not ready:
        return {}, {}, None
    with watched(device, gpu_uuid) as watch:
        look = watch.read if watch else None
        read = partial(time_functions, device=device, seed=seed, observe=look, timer=timer, flush=flush, renew=renew)
        timed, failures = _together_or_alone(read, ready, budget_s, patient)
        return timed, failures, watch.summary() if watch else None


def _together_or_alone(
    read: Callable[..., dict[str, Samples]], ready: Mapping[str, Function], budget_s: float, patient: bool
) -> tuple[dict[str, Samples], dict[str, Failed]]:
    def together(those: Mapping[str, Function]) -> dict[str, Samples]:
        seconds = budget_s * len(those)
        return read(those, budget_s=seconds, more_s=seconds if patient else 0.0)

    try:
        return together(ready), {}
    except known_errors() as error:
        if len(ready) == 1:
            return {}, {name: failure(error, "while timed") for name in ready}
    alone: dict[str, Samples] = {}
    failures: dict[str, Failed] = {}
    for name, function in ready.items():
        try:
            alone |= together({name: function})
        except known_errors() as error:
            failures[name] = failure(error, "while timed")
    if len(alone) > 1:
        try:
            return together({name: ready[name] for name in alone}), failures
        except known_errors():
            note = ", timed alone"
            alone = {name: replace(samples, method=samples.method + note) for name, samples in alone.items()}
    return alone, failures


def watched(device: torch.device, gpu_uuid: str | None) -> AbstractContextManager[ClockWatch | None]:
    """The watch of a GPU's clocks; the device itself reads its SM clock too, or the summary says why not."""
    if device.type != "cuda":
        return nullcontext()
    from rooflab.bench.core.timers.card import ClockWatch

    if interpreting():
        return ClockWatch(gpu_uuid)
    try:
        from rooflab.bench.core.timers.sm_clock import DeviceClock  # imports Triton

        return ClockWatch(gpu_uuid, DeviceClock(device))
    except known_errors() as error:
        return ClockWatch(gpu_uuid, unread=f"{type(error).__name__}: {error}")


def observe(timed: Mapping[str, Rotation], device: torch.device) -> tuple[dict[str, Observed], dict[str, Failed]]:
    """Peak memory and device kernels of one call of each kernel, and the failures of kernels that raised an error.

    This runs after the timing of its case, because it attaches a profiler, which may slow all later launches.  Only
    the first case of a process is timed before a profiler was ever attached.
    """
    seen: dict[str, Observed] = {}
    failures: dict[str, Failed] = {}
    for name, rotation in timed.items():
        try:
            seen[name] = observed(rotation.first, device)
        except known_errors() as error:
            failures[name] = failure(error, "after timing")
    return seen, failures
