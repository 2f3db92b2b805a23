"""Measures the peak rates of a GPU with microkernels, and makes a record for each launch shape.

The launch shapes of a limit are timed in turn, and the fastest shape sets the limit.  A valid reading has right
results, and half the work takes about half the time.  Its rate is below the card's limit at its highest clock, and the
card was not throttled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rooflab.bench.base.plain import first_line
from rooflab.bench.core.ceilings.compute import mma_sync, vector, wgmma
from rooflab.bench.core.ceilings.microkernel import SOURCE_FOLDER, Card, Microkernel
from rooflab.bench.core.ceilings.streams import empty, streams
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.noise import MAX_EXCESS, Samples, with_reading
from rooflab.bench.core.record import Record, Status
from rooflab.bench.core.timers.timing import time_functions
from rooflab.kernels import _cuda
from rooflab.kernels._cuda import CudaCompileError
from rooflab.roofline.device import identify
from rooflab.roofline.model import Ceilings

TARGET_LAUNCH_S = 2e-3
"""Target duration of a launch.  The launch overhead is a thousandth of this duration."""
PROBE_S = 0.02
MAX_GROWTH = 64
"""A probe's repeats grow at most by this factor in one step, because the first reading is on a cold device."""
HALF_TIME_RANGE = (0.4, 0.6)
"""The allowed share of the time for half of the work.  Otherwise the kernel did not do the assumed work."""
GROUPS_OF_HOPPER = 18
"""The number of limits of a Hopper GPU.  The budget is divided by this number; a card with fewer limits takes less."""
KERNEL_MAKERS = (streams, vector, wgmma, mma_sync)
TimeFunction = Callable[..., dict[str, Samples]]
"""The type of `timing.time_functions` with a fixed device."""


def card_of(device: torch.device) -> Card:
    """Returns facts about the GPU `device`, as torch reports them."""
    properties: Any = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return Card(device, 10 * major + minor, properties.multi_processor_count, properties.L2_cache_size)


def microkernels_hash() -> str:
    """Returns a hash of the microkernels' source files.  If the hash changes, the limits are measured again."""
    source_digest = hashlib.sha256()
    for source_file in sorted(
        [*SOURCE_FOLDER.glob("*.cu"), *(SOURCE_FOLDER / f"{name}.py" for name in ("microkernel", "streams", "compute"))]
    ):
        source_digest.update(source_file.name.encode() + b"\0" + source_file.read_bytes() + b"\0")
    return source_digest.hexdigest()[:16]


def measure_cuda(device: torch.device, environment: Environment, budget_s: float) -> list[Record]:
    """Returns a record for each launch shape.  Takes about `budget_s` seconds; compilation and checks come on top.

    Raises `ValueError` if CuPy is not installed."""
    record_fields: dict[str, Any] = environment.record_fields()
    record_fields["environment"] |= {"microkernels": microkernels_hash()}
    blank_record = Record(kind="ceiling", status="OK", backend="cuda", device="cuda", checked_by="gpu", **record_fields)
    time_kernels: TimeFunction = partial(time_functions, device=device, min_samples=3)
    limit_budget_s = budget_s / GROUPS_OF_HOPPER
    gpu_card = card_of(device)
    records: list[Record] = []
    for kernel_maker in KERNEL_MAKERS:
        try:
            for kernels in kernel_maker(gpu_card, _cuda.load):
                records += _shapes(kernels, blank_record, time_kernels, limit_budget_s)
        except RuntimeError as error:  # the memory is too small, or the device is lost
            records.append(_failed(replace(blank_record, kernel=kernel_maker.__name__), error))
    return [*records, _floor(blank_record, time_kernels, limit_budget_s)]


def compile_microkernels() -> int:
    """Compiles every microkernel for Hopper into the cache, without a GPU; returns the number of microkernels.

    The compiled code does not depend on the card's sizes, so the operands here have the sizes for a tiny card."""
    compiled_sources: set[tuple[str, tuple[str, ...]]] = set()

    def load(source: str, name: str, *, options: tuple[str, ...] = ()) -> Callable[..., None]:
        compiled_sources.add((source, options))
        return lambda *arguments, **named: None

    for kernel_maker in KERNEL_MAKERS:
        list(kernel_maker(Card(torch.device("cpu"), 90, 1, 2**20), load))
    empty(load)
    for source, options in compiled_sources:
        _cuda.compile_cubin(source, options=options)
    return len(compiled_sources)


LIMIT_KINDS = {
    "hbm_": ("B/s", "hbm_bytes_per_s"),
    "memory ": ("B/s", "hbm_bytes_per_s"),
    "l2_": ("B/s", "l2_bytes_per_s"),
    "ex2": ("op/s", "sfu_ops_per_s"),
    "rsqrt": ("op/s", "sfu_ops_per_s"),  # of older records
    "launch ": ("s", "launch_floor_s"),
}
"""The unit of a limit and its field in `Ceilings`, by the beginning of the limit's name; other limits are FLOP/s."""


def kind_of(limit: str) -> tuple[str, str]:
    """Returns two texts for a hardware limit: its unit, and its field in `Ceilings`.  For the rate of a matrix product,
    only the unit is right, because `Ceilings` stores these rates by dtype."""
    return next(
        (kind for prefix, kind in LIMIT_KINDS.items() if limit.startswith(prefix)), ("FLOP/s", "vector_flops_per_s")
    )


def value_in(ceilings: Ceilings, record: Record) -> float | None:
    """Returns the value in `ceilings` for the limit that `record` measured; None if there is no value."""
    if record.scheme is not None:
        return ceilings.tensor_flops_per_s.get(record.scheme)
    return getattr(ceilings, kind_of(str(record.kernel))[1]) or None


def _failed(record: Record, error: Exception) -> Record:
    out_of_memory, compile_failed = (
        isinstance(error, error_type) for error_type in (torch.cuda.OutOfMemoryError, CudaCompileError)
    )
    status: Status = "OUT_OF_MEMORY" if out_of_memory else "COMPILE_ERROR" if compile_failed else "RUNTIME_ERROR"
    return replace(record, status=status, reason=first_line(error))


def _checked(kernel: Microkernel, repeats: int, blank: Record) -> Record:
    """Checks the results of a microkernel, a small kernel that measures one hardware limit.  Returns a record with the
    status.  The record also has the SM clock, in Hz, of the microkernel's last launch before this check."""
    record = replace(blank, kernel=kernel.limit, scheme=kernel.dtype, config=kernel.config)
    try:
        clock_hz = kernel.clock_hz()  # the device is waited for here, and reports what a launch before did wrong
        result_fault = kernel.wrong(repeats)
    except RuntimeError as error:
        return _failed(record, error)
    if result_fault:
        return replace(record, status="INCORRECT", reason=result_fault)
    return replace(record, metrics={} if clock_hz is None else {"sm_clock_hz": clock_hz})


def _shapes(kernels: Sequence[Microkernel], blank: Record, time: TimeFunction, share_s: float) -> list[Record]:
    """Measures one hardware limit, and returns a record for each launch shape.  Each launch shape has its own
    microkernel, a small kernel that stresses this limit.

    First checks each microkernel's results.  Then times the right ones, each with all and with half of its work."""
    check_records = [_checked(kernel, 2, blank) for kernel in kernels]
    failed_records = [record for record in check_records if record.status != "OK"]
    right_kernels = [kernel for kernel, record in zip(kernels, check_records, strict=True) if record.status == "OK"]
    if not right_kernels:
        return failed_records
    from rooflab.bench.core.timers.card import ClockWatch  # a CPU does without it

    with ClockWatch((blank.environment["gpu"] or {}).get("uuid")) as clock_log:
        try:
            repeats = _repeats(right_kernels, time)
            functions = {}
            for index, kernel in enumerate(right_kernels):
                functions[f"{index} whole"] = partial(kernel.launch, repeats[index])
                functions[f"{index} half"] = partial(kernel.launch, repeats[index] // 2)
            readings = time(
                functions, budget_s=share_s, cold=right_kernels[0].fixed_repeats is not None, observe=clock_log.read
            )
        except RuntimeError as error:
            return failed_records + [_failed(record, error) for record in check_records if record.status == "OK"]
        clocks = clock_log.summary()
    return failed_records + [
        _judged(
            kernel, repeats[index], readings[f"{index} whole"], readings[f"{index} half"], replace(blank, clocks=clocks)
        )
        for index, kernel in enumerate(right_kernels)
    ]


def _repeats(kernels: list[Microkernel], time: TimeFunction) -> list[int]:
    """Returns an even number of repeats per launch for each kernel.  A launch of the first kernel takes about
    `TARGET_LAUNCH_S` seconds.  The launches of the other kernels do about the same work."""
    first_kernel = kernels[0]
    if first_kernel.fixed_repeats is not None:
        return [kernel.fixed_repeats or 2 for kernel in kernels]
    repeat_count = 2
    while True:
        probe_calls = {"probe": partial(first_kernel.launch, repeat_count)}
        launch_s = time(probe_calls, budget_s=PROBE_S, cold=False)["probe"].median_s
        if launch_s >= TARGET_LAUNCH_S / 2:
            break
        repeat_growth = min(MAX_GROWTH, max(2.0, TARGET_LAUNCH_S / launch_s)) if launch_s > 0 else MAX_GROWTH
        repeat_count = 2 * round(repeat_count * repeat_growth / 2)
    launch_work = repeat_count * first_kernel.work
    return [max(2, 2 * round(launch_work / kernel.work / 2)) for kernel in kernels]


def _judged(kernel: Microkernel, repeats: int, whole: Samples, half: Samples, blank: Record) -> Record:
    record = _checked(kernel, repeats, blank)
    if record.status != "OK":
        return replace(record, clocks=None)
    total_work, throttle_reasons = repeats * kernel.work, (blank.clocks or {}).get("throttled")
    half_time_ratio = half.median_s / whole.median_s if whole.median_s else 0.0
    gpu = blank.environment["gpu"]
    data_sheet = identify(gpu["name"]) if gpu else None
    max_rate = value_in(data_sheet.ceilings(data_sheet.max_clock_hz), record) if data_sheet else None
    reason = whole.fault
    if not reason and throttle_reasons:
        reason = f"the card was throttled ({', '.join(throttle_reasons)})"
    elif not reason and not HALF_TIME_RANGE[0] <= half_time_ratio <= HALF_TIME_RANGE[1]:
        reason = f"half of the work took {half_time_ratio:.0%} of the time; likely cause: a compiler left work out"
    elif not reason and max_rate is not None and total_work / whole.median_s > MAX_EXCESS * max_rate:
        reason = f"{total_work / whole.median_s / max_rate:.2f} times what the card can do at its highest clock"
    return _timed(record, whole, total_work, reason)


def _floor(blank: Record, time: TimeFunction, share_s: float) -> Record:
    """Measures the time of the shortest launch, that of an empty kernel.  Returns the record of this time."""
    record = replace(blank, kernel="launch events", config={})
    try:
        samples = time({"nothing": empty(_cuda.load)}, budget_s=share_s, cold=False)["nothing"]
    except RuntimeError as error:
        return _failed(record, error)
    return _timed(record, samples, 1.0, samples.fault or ("" if min(samples.seconds) > 0 else "the timer read no time"))


def _timed(record: Record, samples: Samples, work: float, reason: str) -> Record:
    """Adds the timing samples and the resulting rate to `record`.  `work` is the work of one launch.  The record
    becomes INVALID if `reason` is not empty."""
    limit_unit, _ = kind_of(str(record.kernel))
    work_rate = None if reason else work / samples.median_s
    timed_record = with_reading(record, samples, record.clocks)
    timed_metrics = {**record.metrics, **timed_record.metrics, "work": work}
    if work_rate is not None and limit_unit == "s":
        timed_metrics["launch_floor_s"] = min(samples.seconds)
    if work_rate is not None and limit_unit == "op/s":
        timed_metrics["ops_per_s"] = work_rate
    return replace(
        timed_record,
        status="INVALID" if reason else "OK",
        reason=reason,
        flops_per_s=work_rate if limit_unit == "FLOP/s" else None,
        bytes_per_s=work_rate if limit_unit == "B/s" else None,
        metrics=timed_metrics,
    )
