"""Measures a GPU's ceilings with the microkernels.

Several launch shapes measure each limit, timed interleaved; the fastest counts and all are kept.  A reading counts
only where its kernel's results are right, half the work takes about half the time, the rate is below the card's limit
at its highest clock, and the card was not throttled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rooflab.bench.core.call import free_bytes
from rooflab.bench.core.ceilings.microkernels import arithmetic, floors, memory, mma_sync, wgmma
from rooflab.bench.core.ceilings.microkernels.microkernel import Card, Groups, Load, Microkernel, MicrokernelGroup
from rooflab.bench.core.ceilings.readings import MicrokernelReading, rate_of
from rooflab.bench.core.failed import first_line
from rooflab.bench.core.noise import ABOVE, Samples
from rooflab.bench.core.record import Status
from rooflab.bench.core.timers.card import ClockWatch
from rooflab.bench.core.timers.timing import TIMERS, time_functions
from rooflab.kernels import _cuda
from rooflab.kernels._cuda import CudaCompileError
from rooflab.roofline.model import Ceilings

TARGET_S = 2e-3
"""Target length of a launch: the launch overhead is a thousandth of it."""
PROBE_S = 0.02
LARGEST_STEP = 64
"""Largest growth factor of a probe's repeats in one step, because the first reading is of a cold device."""
HALF = (0.4, 0.6)
"""Allowed share of the time for half of the work; outside it the kernel did not do the assumed work."""
GROUPS_OF_HOPPER = 25
"""Number of limits of a Hopper; the budget is divided by it, so that a card with fewer limits takes less."""
MODULES = (memory, arithmetic, wgmma, mma_sync)


Timer = Callable[..., Mapping[str, Samples]]
"""`timing.time_functions` on one device."""


def card_of(device: torch.device) -> Card:
    """The card as torch reports it."""
    properties: Any = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    sms, l2_bytes = properties.multi_processor_count, properties.L2_cache_size
    return Card(device, 10 * major + minor, sms, l2_bytes, free_bytes(device))


def measure_cuda(
    device: torch.device,
    *,
    budget_s: float,
    limits: Ceilings | None = None,
    uuid: str | None = None,
    advance: Callable[[str], None] = lambda limit: None,
    card: Card | None = None,
    load: Load = _cuda.load,
    time: Timer | None = None,
    timers: tuple[str, ...] = TIMERS["cuda"],
) -> list[MicrokernelReading]:
    """All readings, in about `budget_s` seconds beside compiling and checking.

    `limits` are the rates that the card cannot exceed, at its highest clock.  `advance` is called once a limit.  Raises
    `ValueError` where CuPy is not installed.
    """
    run = _ShapeRun(
        time or partial(time_functions, device=device, min_samples=3), budget_s / GROUPS_OF_HOPPER, limits, uuid
    )
    readings: list[MicrokernelReading] = []
    for group in _groups(card or card_of(device), load):
        if isinstance(group, MicrokernelReading):
            readings.append(group)
            continue
        advance(group.limit)
        readings += run.group(group)
    advance("launch")
    return readings + run.floors(load, timers)


def compile_microkernels() -> int:
    """Compiles every microkernel of a Hopper into the cache, with no GPU; returns their number.

    Their code does not depend on the card's sizes, so the operands here are those of a tiny one.
    """
    sources: list[tuple[str, tuple[str, ...]]] = []

    def load(source: str, name: str, *, options: tuple[str, ...] = ()) -> None:
        sources.append((source, options))

    made: Any = load
    for _ in _groups(Card(torch.device("cpu"), 90, 1, 2**20, 2.0**33), made):
        pass
    floors.empty(made)
    for source, options in dict.fromkeys(sources):
        _cuda.compile_cubin(source, options=options)
    return len(set(sources))


def _groups(card: Card, load: Load) -> Iterator[MicrokernelGroup | MicrokernelReading]:
    """Every module's groups; where a group could not be made, a reading with the reason."""
    for module in MODULES:
        groups: Groups = module.groups(card, load)
        try:
            yield from groups
        except (torch.cuda.OutOfMemoryError, memory.TooLittleMemory) as error:
            yield _unmade(module.__name__, "OUT_OF_MEMORY", error)
        except RuntimeError as error:
            yield _unmade(module.__name__, "RUNTIME_ERROR", error)


def _unmade(module: str, status: Status, error: BaseException) -> MicrokernelReading:
    return MicrokernelReading(module.rpartition(".")[2], "op", {}, status, first_line(error))


@dataclass
class _ShapeRun:
    _time: Timer
    _share_s: float
    _limits: Ceilings | None
    _uuid: str | None

    def group(self, group: MicrokernelGroup) -> list[MicrokernelReading]:
        """Every launch shape of one limit: those that are right are timed, whole and half, against each other."""
        failed, usable = [], []
        for kernel in group.kernels:
            problem = self._tried(kernel, 2)
            if problem is None:
                usable.append(kernel)
            else:
                failed.append(_reading(kernel, *problem))
        if not usable:
            return failed
        with ClockWatch(self._uuid) as watch:
            try:
                repeats = self._repeats(usable)
                functions = {}
                for index, kernel in enumerate(usable):
                    functions[f"{index} whole"] = partial(kernel.launch, repeats[index])
                    functions[f"{index} half"] = partial(kernel.launch, repeats[index] // 2)
                timed = self._time(functions, budget_s=self._share_s, cold=usable[0].cold, observe=watch.read)
            except RuntimeError as error:
                return failed + [_reading(kernel, "RUNTIME_ERROR", first_line(error)) for kernel in usable]
            clocks = watch.summary()
        return failed + [
            self._judged(kernel, repeats[index], timed[f"{index} whole"], timed[f"{index} half"], clocks)
            for index, kernel in enumerate(usable)
        ]

    def floors(self, load: Load, timers: tuple[str, ...]) -> list[MicrokernelReading]:
        """The time of an empty kernel by each timing method."""
        readings = []
        for timer in timers:
            empty = floors.empty(load)
            named = replace(empty, limit=f"launch {timer}")
            try:
                launch = {"nothing": partial(empty.launch, 1)}
                samples = self._time(launch, budget_s=self._share_s, cold=False, timer=timer)["nothing"]
            except (RuntimeError, ValueError) as error:
                if isinstance(error, ValueError) and not str(error).startswith("UNSUPPORTED"):
                    raise
                readings.append(_reading(named, "RUNTIME_ERROR", first_line(error)))
                continue
            problem = samples.fault or ("" if min(samples.seconds) > 0 else "the timer read no time")
            read = _reading(named, "INVALID" if problem else "OK", problem)
            readings.append(_with_samples(read, samples, 1.0, None))
        return readings

    def _tried(self, kernel: Microkernel, repeats: int) -> tuple[Status, str] | None:
        """What is wrong with a launch of `kernel`, or None."""
        try:
            wrong = kernel.wrong(repeats)
        except CudaCompileError as error:
            return "COMPILE_ERROR", first_line(error)
        except RuntimeError as error:
            return "RUNTIME_ERROR", first_line(error)
        return ("INCORRECT", wrong) if wrong else None

    def _repeats(self, kernels: list[Microkernel]) -> list[int]:
        """Even repeats with which a launch of each takes about `TARGET_S`, found with the first for all."""
        first = kernels[0]
        if first.fixed_repeats is not None:
            return [kernel.fixed_repeats or 2 for kernel in kernels]
        repeats = 2
        while True:
            probe = {"probe": partial(first.launch, repeats)}
            seconds = self._time(probe, budget_s=PROBE_S, cold=False)["probe"].median_s
            if seconds >= TARGET_S / 2:
                break
            grow = min(LARGEST_STEP, max(2.0, TARGET_S / seconds)) if seconds > 0 else LARGEST_STEP
            repeats = 2 * round(repeats * grow / 2)
        work = repeats * first.work
        return [max(2, 2 * round(work / kernel.work / 2)) for kernel in kernels]

    def _judged(
        self, kernel: Microkernel, repeats: int, whole: Samples, half: Samples, clocks: Mapping[str, Any] | None
    ) -> MicrokernelReading:
        try:
            clock_hz = kernel.clock_hz()
        except RuntimeError as error:  # of a launch before it, which is reported where the device is next waited for
            return _reading(kernel, "RUNTIME_ERROR", first_line(error))
        problem = self._tried(kernel, repeats)
        if problem is not None:
            return _reading(kernel, *problem)
        read = _with_samples(_reading(kernel, "OK", ""), whole, repeats * kernel.work, clock_hz)
        read = replace(read, clocks=clocks)
        reason = whole.fault or self._implausible(read, half)
        return replace(read, status="INVALID", reason=reason) if reason else read

    def _implausible(self, read: MicrokernelReading, half: Samples) -> str:
        throttled = (read.clocks or {}).get("throttled")
        if throttled:
            return f"the card was throttled ({', '.join(throttled)})"
        share = half.median_s / read.median_s if read.median_s else 0.0
        if not HALF[0] <= share <= HALF[1]:
            return f"half of the work took {share:.0%} of the time; likely cause: a compiler left work out"
        most, rate = rate_of(self._limits, read.limit, read.dtype), read.rate_per_s
        if most is not None and rate is not None and rate > ABOVE * most:
            return f"{rate / most:.2f} times what the card can do at its highest clock"
        return ""


def _reading(kernel: Microkernel, status: Status, reason: str) -> MicrokernelReading:
    return MicrokernelReading(kernel.limit, kernel.unit, kernel.config, status, reason, kernel.dtype)


def _with_samples(
    read: MicrokernelReading, samples: Samples, work: float, clock_hz: float | None
) -> MicrokernelReading:
    return replace(
        read, work=work, seconds=samples.seconds, timer=samples.method, l2_state=samples.l2_state, clock_hz=clock_hz
    )
