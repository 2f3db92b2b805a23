"""Holds the time samples of a function, and rules that say when a reading is NOISY or INVALID.

A reading is NOISY if its median is unreliable, because the machine did other work or there are too few samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rooflab.bench.base.plain import JsonObject
from rooflab.bench.core.record import L2State, Record
from rooflab.roofline.model import Ceilings, Cost, bound

MAX_WAIT_RATIO = 0.05
"""The highest allowed ratio of the time that threads waited for a processor to the time that threads ran.  On a 2-core
EPYC: 0.001 to 0.01 when quiet, 0.34 to 0.47 with one core busy, 1.0 with both cores busy."""
MAX_SPREAD = 2.0
"""The highest allowed ratio of the 80th percentile to the 20th.  On that EPYC: 1.05 to 1.7 when quiet, up to 200 with
both cores busy.  It also shows other guests of the same host, and other work on a GPU; `MAX_WAIT_RATIO` cannot."""
MAX_DRIFT = 1.5
"""The highest allowed ratio, up or down, of the medians of the later and the earlier half: up to 1.4 when quiet."""
FEWEST = 0.25
"""The lowest allowed number of samples, as a share of those that fit into the time (the time over the median sample).
With a first call of 300 ms in a budget of 150 ms, 5 of 80 samples were left, and their median was 6% too long."""
MAX_EXCESS = 1.05
"""If a reading exceeds a limit by more than this factor, noise is not the reason."""
LIKELY_CAUSES = {
    "memory": "a cache held the data, or the cost counts bytes that the op need not touch",
    "tensor": "the cost counts work that these inputs do not need, or it was done in a lower precision",
    "vector": "the cost counts work that these inputs do not need",
    "sfu": "the cost counts special functions that these inputs do not need",
    "launch": "launches were merged, or the clock stopped before they ended",
    "L2": "kernels were not timed, or the cost counts bytes that the op need not touch",
}


@dataclass(frozen=True)
class Samples:
    """The time samples of one function.  A field is None or empty if the timing method does not record it."""

    seconds: tuple[float, ...]
    """Seconds per call of every sample, in time order; no sample is dropped."""
    method: str
    """Name of the timing method."""
    l2_state: L2State
    """Whether the last-level cache held the function's data when a sample began."""
    calls_per_sample: int = 1
    resolved: bool = True
    """Whether the median sample has at least `timing.STEPS_PER_SAMPLE` timer steps; else the reading is UNRESOLVED."""
    noise: str = ""
    """Why the reading is unreliable: the machine was busy, or the samples spread, drift or are too few."""
    few: str = ""
    """Why there are too few samples; then the reading is noise too."""
    fault: str = ""
    """Why the reading must not be published, such as a replaced clock."""
    launch_floor_s: float | None = None
    """Seconds per call of an empty kernel, by the same method with as many calls per sample; None on a CPU."""

    @property
    def median_s(self) -> float:
        """The median of the samples, in seconds per call."""
        return float(np.median(self.seconds))


def few(samples: int, room: int) -> str:
    """Explains why a reading has too few samples, or returns "".  Its time budget had room for `room` samples."""
    if samples >= FEWEST * room:
        return ""
    return f"it has {samples} samples, and its time has room for {room}: some calls were far slower than the others"


def why_noisy(seconds: Sequence[float], waiting: float | None) -> str:
    """Returns one sentence if the samples are too noisy, else an empty text.  The samples are in time order.

    `waiting` is the threads' wait for a processor divided by run time, or None.  Without samples, it alone decides."""
    if waiting is not None and waiting > MAX_WAIT_RATIO:
        return f"other processes were running: for each second of work, the threads waited {waiting:.2f} s for a core"
    if not len(seconds):
        return ""
    p20, p80 = np.percentile(seconds, (20, 80))
    if p80 > MAX_SPREAD * p20:
        return f"the samples' 80th percentile is {p80 / p20:.2g} times their 20th" if p20 > 0 else "a sample is zero"
    half_size = len(seconds) // 2
    early_s, late_s = (float(np.median(samples)) for samples in (seconds[: half_size or 1], seconds[half_size:]))
    if max(early_s, late_s) > MAX_DRIFT * min(early_s, late_s):
        return f"the median of the later half of the samples is {late_s / early_s:.2g} times that of the earlier half"
    return ""


def shared(clocks: JsonObject | None) -> str:
    """Returns a sentence if other processes used the card during a reading, which is then noise; else "".

    The result is also "" if NVML reports no processes.  `clocks` is the result of `ClockWatch.summary()`."""
    other_processes = (clocks or {}).get("other_processes")
    return f"other processes were on the card: {other_processes}" if other_processes else ""


def above_limits(samples: Samples, cost: Cost, limits: Ceilings) -> tuple[str, float] | None:
    """Returns the limit that a reading exceeds by the largest factor, and this factor; None if it exceeds no limit.

    On a GPU, written data may still be in L2 when the timer stops.  So HBM's rate limits only the bytes read from a
    cold L2.  L2's rate limits all bytes.  A dtype without a known rate for matrix products sets no limit."""
    tensor_flops = {dtype: flops for dtype, flops in cost.tensor_flops.items() if dtype in limits.tensor_flops_per_s}
    capped_cost = replace(cost, tensor_flops=tensor_flops)
    on_gpu = samples.method.startswith("cuda")
    if on_gpu:
        read_bytes = 0.0 if samples.l2_state == "warm" else cost.read_bytes
        capped_cost = replace(capped_cost, write_bytes=0.0, read_bytes=read_bytes)
    time_bound = bound(capped_cost, limits)
    excess_by_limit: dict[str, float] = {time_bound.limiter: time_bound.fraction(samples.median_s)}
    if limits.l2_bytes_per_s and on_gpu:
        excess_by_limit["L2"] = cost.bytes / limits.l2_bytes_per_s / samples.median_s
    worst_limit = max(excess_by_limit, key=lambda part: excess_by_limit[part])
    return (worst_limit, excess_by_limit[worst_limit]) if excess_by_limit[worst_limit] > MAX_EXCESS else None


def why_invalid(
    samples: Samples, cost: Cost | None, limits: Ceilings | None, clocks: JsonObject | None = None
) -> str | None:
    """Returns one sentence with the likely cause if a reading is INVALID; None if it is valid.

    The causes are, in order: a fault found by the timer, a stopped timer, a throttled card, a time below that of an
    empty kernel, a timer too coarse (`UNRESOLVED: ...`), a rate above `limits`.  An argument of None is not checked."""
    median_s, method, floor_s = samples.median_s, samples.method, samples.launch_floor_s
    if samples.fault:
        return samples.fault
    if bad_count := sum(not math.isfinite(sample_s) for sample_s in (*samples.seconds, median_s)):
        return f"{bad_count} readings are not finite numbers; likely cause: the timer failed"
    if median_s <= 0 or min(samples.seconds) < 0:
        return f"the {method} timer read {median_s:g} s; likely cause: the clock stands still, or nothing was launched"
    if throttle_reasons := (clocks or {}).get("throttled"):
        return f"the card was throttled ({', '.join(throttle_reasons)}); likely cause: cooling or power supply"
    if floor_s is not None and median_s * MAX_EXCESS < floor_s:
        return (
            f"{median_s * 1e6:.2f} us is below the {floor_s * 1e6:.2f} us that an empty kernel takes by {method}; "
            f"likely cause: nothing was launched, as by a cached answer, or another stream did the work"
        )
    if not samples.resolved:
        return f"UNRESOLVED: the {method} timer is too coarse for it"
    excess = above_limits(samples, cost, limits) if cost and limits else None
    return (
        f"{excess[1]:.2f} times the {excess[0]} ceiling; likely cause: {LIKELY_CAUSES[excess[0]]}" if excess else None
    )


def with_reading(record: Record, samples: Samples, clocks: JsonObject | None) -> Record:
    """Adds a time reading to the record, but no rates.  Samples that are not finite are kept but give no latency."""
    floor_field = {} if samples.launch_floor_s is None else {"launch_floor_ms": samples.launch_floor_s * 1e3}
    time_fields = (*np.percentile(samples.seconds, (20, 80)).tolist(), samples.median_s)
    p20_ms, p80_ms, median_ms = (seconds * 1e3 if math.isfinite(seconds) else None for seconds in time_fields)
    return replace(
        record,
        basis="measured",
        timer=samples.method,
        l2_state=samples.l2_state,
        latency_p20_ms=p20_ms,
        latency_median_ms=median_ms,
        latency_p80_ms=p80_ms,
        samples=Record.packed(samples.seconds),
        sample_count=len(samples.seconds),
        clocks=clocks,
        metrics={"calls_per_sample": float(samples.calls_per_sample), **floor_field},
    )
