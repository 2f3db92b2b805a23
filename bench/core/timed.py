"""Times several kernels in turn on changing input values.  Checks the outputs of the last timed calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rooflab.bench.base.plain import JsonObject
from rooflab.bench.core.call import Rotation
from rooflab.bench.core.check_data import CheckData
from rooflab.bench.core.environment import gpu_uuid
from rooflab.bench.core.failed import Failed
from rooflab.bench.core.noise import Samples
from rooflab.bench.core.poison import alike, kept_names, same_bits
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timers import Function
from rooflab.bench.core.timers.timing import time_functions
from rooflab.reference.spec import Case, Inputs, OpSpec, Scheme

if TYPE_CHECKING:  # a CPU does without it
    from rooflab.bench.core.timers.card import ClockWatch

INTERPRETED = "on a CPU it runs in Triton's interpreter, whose time is not the kernel's; `rooflab check` emulates it"


def time_together(
    ready: Mapping[str, Function], settings: Settings, renew: Callable[[], None] | None = None
) -> tuple[dict[str, Samples], dict[str, Failed], JsonObject | None]:
    """Times the kernels in `ready` in turn.  Returns the samples, the errors of failed kernels, and the GPU's clocks.

    The time budget, in seconds per kernel, doubles if samples are noisy.  With `settings.paired`, noise does not
    lengthen the timing.  If a kernel fails, each is timed alone to find it.  Then the others are timed together."""
    if not ready:
        return {}, {}, None
    device = torch.device(settings.device)
    with watched(device) as clock_monitor:
        sampling_call = partial(
            time_functions,
            device=device,
            min_samples=settings.min_samples,
            seed=settings.seed,
            observe=clock_monitor.read if clock_monitor else None,
            renew=renew,
        )
        samples, failed_kernels = _together_or_alone(sampling_call, ready, settings.budget_s, not settings.paired)
        return samples, failed_kernels, clock_monitor.summary() if clock_monitor else None


def _together_or_alone(
    read: Callable[..., dict[str, Samples]], ready: Mapping[str, Function], budget_s: float, patient: bool
) -> tuple[dict[str, Samples], dict[str, Failed]]:
    def together(those: Mapping[str, Function]) -> dict[str, Samples]:
        total_budget_s = budget_s * len(those)
        return read(those, budget_s=total_budget_s, more_s=total_budget_s if patient else 0.0)

    try:
        return together(ready), {}
    except Failed.errors() as error:
        if len(ready) == 1:
            return {}, {name: Failed.of(error, "while timed") for name in ready}
    failed_kernels: dict[str, Failed] = {}
    for name, timed_call in ready.items():
        try:
            together({name: timed_call})
        except Failed.errors() as error:
            failed_kernels[name] = Failed.of(error, "while timed")
    working_calls = {name: timed_call for name, timed_call in ready.items() if name not in failed_kernels}
    try:
        return together(working_calls) if working_calls else {}, failed_kernels
    except Failed.errors() as error:
        return {}, failed_kernels | dict.fromkeys(working_calls, Failed.of(error, "while timed together"))


def watched(device: torch.device) -> AbstractContextManager[ClockWatch | None]:
    """Returns a context with a GPU's `ClockWatch` (on a CPU: None).  If no SM clock is readable, the watch says why."""
    if device.type != "cuda":
        return nullcontext()
    from rooflab.bench.core.timers.card import ClockWatch

    device_uuid = gpu_uuid(device)
    try:
        from rooflab.bench.core.timers.sm_clock import DeviceClock  # imports Triton

        return ClockWatch(device_uuid, DeviceClock(device))
    except Failed.errors() as error:
        return ClockWatch(device_uuid, unread=f"{type(error).__name__}: {error}")


def observe(timed: Mapping[str, Rotation], device: torch.device) -> tuple[dict[str, dict[str, Any]], dict[str, Failed]]:
    """Runs each timed kernel under a profiler on a GPU.  Returns each kernel's peak memory and the work that the device
    ran (kernels, copies, fills), and the errors of failed kernels.

    Does nothing on a CPU.  Call it only after timing, because a profiler may slow all later launches of the process."""
    fields_by_name: dict[str, dict[str, Any]] = {}
    failed_kernels: dict[str, Failed] = {}
    if device.type == "cpu":
        return fields_by_name, failed_kernels
    from rooflab.bench.core.timers.activity import observed
    from rooflab.bench.core.timers.cuda import CudaCalls

    for name, input_rotation in timed.items():
        try:
            fields_by_name[name] = observed(input_rotation.first, CudaCalls(device))
        except Failed.errors() as error:
            failed_kernels[name] = Failed.of(error, "after timing")
    return fields_by_name, failed_kernels


class Unseen:
    """Gives the timed kernels new input values between the rounds of timing, so that a cached output is wrong.

    The first values come from a random seed.  Each call of this object then changes one row of each input.

    These inputs never change: weights, integer inputs (such as page tables and lengths), inputs that the op writes, and
    inputs with NaN or infinite values.  If the shapes depend on the seed, no input changes."""

    def __init__(
        self, spec: OpSpec, case: Case, scheme: Scheme, device: torch.device, copies: Sequence[Inputs], seed: int
    ):
        self._copies = copies
        self._random = random.Random()
        fresh_inputs = spec.make_inputs(case, scheme, device, self._random.randrange(2**31))
        fixed_inputs = kept_names(spec, fresh_inputs) | set(spec.mutates)
        has_same_shapes = alike(copies[0], fresh_inputs)
        new_values = {
            name: input_value
            for name, input_value in fresh_inputs.items()
            if has_same_shapes and name not in fixed_inputs and _finite(input_value)
        }
        del fresh_inputs  # before another set is made: its weights may take a large part of the memory
        original_inputs = spec.make_inputs(case, scheme, device, seed)
        self._values = {name: input_value for name, input_value in new_values.items() if _finite(original_inputs[name])}
        cloned_values = {name: input_value.clone() for name, input_value in self._values.items()}
        self._expected = CheckData(spec, {**original_inputs, **cloned_values}, scheme)
        for inputs in copies:
            for name, input_value in cloned_values.items():
                inputs[name].data.copy_(input_value)

    def __call__(self) -> None:
        for name, values in self._values.items():
            values = values.view(torch.uint8) if values.dtype.itemsize == 1 else values  # torch cannot roll fp8
            row_index = tuple(self._random.randrange(axis_size or 1) for axis_size in values.shape[:-1])
            source_index = tuple(self._random.randrange(axis_size or 1) for axis_size in values.shape[:-1])
            if values.numel() > 1:
                rotated_row = values[source_index].roll(self._random.randrange(1, values.shape[-1] + 1))
                for inputs in (*self._copies, self._expected.inputs):
                    inputs[name].data.view(values.dtype)[row_index] = rotated_row

    def wrong(self, timed: Mapping[str, Rotation]) -> dict[str, str]:
        """Returns a description of the error for each kernel that gave wrong outputs in its last timed calls."""
        faults = {}
        for kernel, input_rotation in timed.items():
            for _, outputs in input_rotation.outputs():
                if fault := self._expected.faults(outputs, input_rotation.own_stream):
                    faults[kernel] = fault + (": an input was changed while it was timed" if self._damaged() else "")
        return faults

    def _damaged(self) -> bool:
        return any(
            not same_bits(inputs[name], self._expected.inputs[name]) for inputs in self._copies for name in self._values
        )


def _finite(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return bool(torch.isfinite(value.float()).all())
