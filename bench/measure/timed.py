"""Times kernels together: a kernel that fails does not lose the other kernels' times, and the outputs are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rooflab.bench.calls.calls import Rotation
from rooflab.bench.check.cheats import alike, kept_names, rewrite
from rooflab.bench.check.runs import OTHER_SEED
from rooflab.bench.check.trial import Data, Failed, expect, failure, known_errors
from rooflab.bench.timing.clocks import ClockWatch
from rooflab.bench.timing.stopwatch import FlushBy, Function
from rooflab.bench.timing.timing import Samples, time_functions
from rooflab.bench.timing.trace import Activity, NotRecorded, device_activity, peak_memory_bytes
from rooflab.kernels.registry import interpreting
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme

if TYPE_CHECKING:  # `sm_clock` imports Triton
    from rooflab.bench.timing.sm_clock import DeviceClock


@dataclass(frozen=True)
class Observed:
    """Observations of one call other than its time."""

    peak_memory_bytes: float | None = None
    device_kernels: tuple[str, ...] = ()
    activity_hash: str | None = None


def time_together(
    ready: Mapping[str, Function],
    device: torch.device,
    budget_s: float,
    seed: int,
    gpu_uuid: str | None,
    *,
    timer: str | None = None,
    flush: FlushBy = "read",
) -> tuple[dict[str, Samples], dict[str, Failed], dict[str, Any] | None]:
    """Each kernel's samples, the failures of failed kernels, and the clocks.  `budget_s` is for each kernel.

    If a kernel fails, each kernel is timed alone to find the failed one, and then the rest are timed together.  If
    the rest fail together but each runs alone, the samples taken alone are returned, and their method says so.
    """
    if not ready:
        return {}, {}, None
    device_clock, note = open_clock(device)
    with ClockWatch(gpu_uuid, device_clock) as watch:
        read = partial(time_functions, device=device, seed=seed, observe=watch.read, timer=timer, flush=flush)
        timed, failures = _together_or_alone(read, ready, budget_s)
        clocks = watch.summary()
        return timed, failures, {**(clocks or {}), **note} or None


def _together_or_alone(
    read: Callable[..., dict[str, Samples]], ready: Mapping[str, Function], budget_s: float
) -> tuple[dict[str, Samples], dict[str, Failed]]:
    try:
        return read(ready, budget_s=budget_s * len(ready)), {}
    except known_errors() as error:
        if len(ready) == 1:
            return {}, {name: failure(error, "while timed") for name in ready}
    alone: dict[str, Samples] = {}
    failures: dict[str, Failed] = {}
    for name, function in ready.items():
        try:
            alone |= read({name: function}, budget_s=budget_s)
        except known_errors() as error:
            failures[name] = failure(error, "while timed")
    if len(alone) > 1:
        try:
            return read({name: ready[name] for name in alone}, budget_s=budget_s * len(alone)), failures
        except known_errors():
            note = ", timed alone"
            alone = {name: replace(samples, method=samples.method + note) for name, samples in alone.items()}
    return alone, failures


def open_clock(device: torch.device) -> tuple[DeviceClock | None, dict[str, str]]:
    """The reader of a CUDA device's SM clock; or None, and the reason under the record's key `sm_clock_unread`."""
    if device.type != "cuda" or interpreting():
        return None, {}
    try:
        from rooflab.bench.timing.sm_clock import DeviceClock  # imports Triton

        return DeviceClock(device), {}
    except known_errors() as error:
        return None, {"sm_clock_unread": f"{type(error).__name__}: {error}"}


def observe(timed: Mapping[str, Rotation], device: torch.device) -> tuple[dict[str, Observed], dict[str, Failed]]:
    """Peak memory and device kernels of one call of each kernel, and the failures of kernels that raised an error.

    This runs after the timing of its case, because it attaches a profiler, which may slow all later launches.  Only
    the first case of a process is timed before a profiler was ever attached.
    """
    seen: dict[str, Observed] = {}
    failures: dict[str, Failed] = {}
    for name, rotation in timed.items():
        try:
            peak, activity = None, Activity((), None)
            with suppress(NotRecorded):  # another profiler runs, or CUPTI is absent: the record then lacks both
                peak = peak_memory_bytes(rotation.first, device)
                if device.type == "cuda":
                    activity = device_activity(rotation.first, device)
            seen[name] = Observed(peak, activity.kernels, activity.hash)
        except known_errors() as error:
            failures[name] = failure(error, "after timing")
    return seen, failures


def wrong_calls(
    timed: Mapping[str, Rotation], spec: OpSpec, case: Case, scheme: Scheme, device: torch.device, seed: int
) -> dict[str, str]:
    """For each wrong kernel, the fault of its outputs from the timed calls, or of its outputs on new data."""
    if not timed:
        return {}
    wrong = wrong_afterwards(timed, spec, scheme, spec.make_inputs(case, scheme, device, seed))
    right = {name: rotation for name, rotation in timed.items() if name not in wrong}
    return wrong | wrong_on_new_data(right, spec, scheme, spec.make_inputs(case, scheme, device, seed + OTHER_SEED))


def wrong_outputs(spec: OpSpec, outputs: Outputs, expected: Data, scheme: Scheme) -> str:
    """The faults of `outputs`, or ""."""
    return "; ".join(stats.describe() for stats in expected.judge(spec, outputs, scheme) if not stats.passed)


def wrong_afterwards(timed: Mapping[str, Rotation], spec: OpSpec, scheme: Scheme, fresh: Inputs) -> dict[str, str]:
    """For each wrong kernel, the fault of its outputs from the timed calls; `fresh` holds unchanged inputs."""
    wrong: dict[str, str] = {}
    expected = expect(spec, fresh, scheme)
    for name, rotation in timed.items():
        for _, outputs in rotation.outputs():
            if bad := wrong_outputs(spec, outputs, expected, scheme):
                wrong[name] = bad
    return wrong


def wrong_on_new_data(timed: Mapping[str, Rotation], spec: OpSpec, scheme: Scheme, fresh: Inputs) -> dict[str, str]:
    """For each wrong kernel, its fault after `fresh` (same case, another seed) has replaced the timed inputs' values.

    This catches a kernel that computes in the check but returns a kept result when timed: the timed input sets hold the
    same values, so its results on them are right. Packed weights stay unchanged. All kernels are of one case, and
    they may share inputs. A kernel is skipped if the shapes of its inputs depend on the seed.
    """
    wrong: dict[str, str] = {}
    expected: Data | None = None
    for name, rotation in timed.items():
        sets = [inputs for inputs, _ in rotation.outputs()]
        if not sets or not all(alike(inputs, fresh) for inputs in sets):
            continue
        for inputs in sets:
            rewrite(inputs, fresh, keep=kept_names(spec, inputs))
        expected = expected or expect(spec, sets[0], scheme)
        try:
            rotation.plan()
            for _ in sets:
                rotation()
        except known_errors() as error:
            wrong[name] = failure(error, "on other data").reason
            continue
        for inputs, outputs in rotation.outputs():
            # Judges with this set's own inputs: another kernel's writes to `sets[0]` must not change this verdict.
            if bad := wrong_outputs(spec, outputs, replace(expected, inputs=inputs), scheme):
                wrong[name] = f"{bad}: a cached answer: other data at the same addresses, once it was timed"
    return wrong
