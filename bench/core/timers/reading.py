"""Decides whether a reading is valid, and converts it to a record's fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from rooflab.bench.core.record import L2State, Record, pack_samples
from rooflab.bench.core.timers.timing import Samples
from rooflab.roofline.model import Ceilings, Cost, Limiter, bound

ABOVE = 1.05
"""A reading beyond a limit by more than this factor is not noise."""
CAUSES: dict[Limiter, str] = {
    "memory": "a cache held the data, or the cost counts bytes that the op need not touch",
    "tensor": "the cost counts work that these inputs do not need, or it was done in a lower precision",
    "vector": "the cost counts work that these inputs do not need",
    "sfu": "the cost counts special functions that these inputs do not need",
    "launch": "launches were merged, or the clock stopped before they ended",
}
L2_CAUSE = "kernels were not timed, or the cost counts bytes that the op need not touch"
FLOOR_CAUSE = "nothing was launched, as by a cached answer, or another stream did the work"


class Above(NamedTuple):
    """A limit, and the factor by which a reading exceeds it."""

    part: Limiter | Literal["L2"]
    times: float

    def describe(self) -> str:
        """`2.88 times the memory ceiling; likely cause: ...`."""
        cause = L2_CAUSE if self.part == "L2" else CAUSES[self.part]
        return f"{self.times:.2f} times the {self.part} ceiling; likely cause: {cause}"


def implausible(
    seconds: float,
    cost: Cost | None,
    limits: Ceilings | None,
    *,
    method: str,
    launch_floor_s: float | None = None,
    samples: Sequence[float] = (),
    clocks: Mapping[str, Any] | None = None,
    l2_state: L2State | None = None,
) -> str | None:
    """Why a reading of `seconds` per call is impossible, in one sentence with its likely cause, or None.

    `limits` are the rates that the device cannot exceed, at its highest clock; the L2 rate bounds data held in L2.
    `launch_floor_s` is the time of an empty kernel by `method`, `samples` are all readings, and `clocks` is
    `ClockWatch.summary()`.  An argument that is None is not checked.
    """
    broken = sum(not math.isfinite(sample) for sample in (*samples, seconds))
    if broken:
        return f"{broken} readings are not finite numbers; likely cause: the timer failed"
    if seconds <= 0 or any(sample < 0 for sample in samples):
        return f"the {method} timer read {seconds:g} s; likely cause: the clock stands still, or nothing was launched"
    throttled = (clocks or {}).get("throttled")
    if throttled:
        return f"the card was throttled ({', '.join(throttled)}); likely cause: cooling or power supply"
    if launch_floor_s is not None and seconds * ABOVE < launch_floor_s:
        return (
            f"{seconds * 1e6:.2f} us is below the {launch_floor_s * 1e6:.2f} us that an empty kernel takes by "
            f"{method}; likely cause: {FLOOR_CAUSE}"
        )
    above = above_limits(seconds, cost, limits, method=method, l2_state=l2_state) if cost and limits else None
    return above.describe() if above else None


def above_limits(
    seconds: float, cost: Cost, limits: Ceilings, *, method: str, l2_state: L2State | None = None
) -> Above | None:
    """The limit that a reading of `seconds` exceeds most, or None where it exceeds no limit.

    On a GPU, written data may still be in L2 when the clock stops.  So HBM's rate bounds only the bytes read, and only
    where L2 was cold; L2's rate bounds all bytes.  A matrix product of a dtype without a rate sets no limit.
    """
    known = {dtype: flops for dtype, flops in cost.tensor_flops.items() if dtype in limits.tensor_flops_per_s}
    bounded = replace(cost, tensor_flops=known)
    l2_rate = limits.l2_bytes_per_s
    on_gpu = method.startswith("cuda")
    if on_gpu:
        bounded = replace(bounded, write_bytes=0.0, read_bytes=0.0 if l2_state == "warm" else cost.read_bytes)
    found = bound(bounded, limits)
    above = Above(found.limiter, found.fraction(seconds))
    if l2_rate and on_gpu:
        above = max(above, Above("L2", cost.bytes / l2_rate / seconds), key=lambda limit: limit.times)
    return above if above.times > ABOVE else None


def why_invalid(
    samples: Samples, cost: Cost | None, limits: Ceilings | None, clocks: Mapping[str, Any] | None = None
) -> str | None:
    """Why a reading is INVALID, in one sentence, or None.

    Checked in this order: a fault that the timer found, a timer that did not advance, a throttled card or a time below
    the launch floor, a clock too coarse (`UNRESOLVED: ...`), and a reading above the device's rates (`limits`).
    """
    check = partial(
        implausible,
        samples.median_s,
        method=samples.method,
        launch_floor_s=samples.launch_floor_s,
        samples=samples.seconds,
        clocks=clocks,
        l2_state=samples.l2_state,
    )
    coarse = None if samples.resolved else f"UNRESOLVED: the {samples.method} timer is too coarse for it"
    return samples.fault or check(cost=None, limits=None) or coarse or check(cost=cost, limits=limits)


def with_reading(record: Record, samples: Samples, clocks: Mapping[str, Any] | None) -> Record:
    """The record with a reading, but for its rates.  Non-finite samples give no latency; they are kept."""
    more = {
        "calls_per_sample": float(samples.calls_per_sample),
        "launch_floor_ms": None if samples.launch_floor_s is None else samples.launch_floor_s * 1e3,
        "kernel_busy_ms": None if samples.busy_s is None else samples.busy_s * 1e3,
        "first_call_ms": None if samples.first_call_s is None else samples.first_call_s * 1e3,
    }
    p20, median, p80 = (
        seconds * 1e3 if math.isfinite(seconds) else None
        for seconds in (samples.p20_s, samples.median_s, samples.p80_s)
    )
    return replace(
        record,
        basis="measured",
        timer=samples.method,
        l2_state=samples.l2_state,
        latency_p20_ms=p20,
        latency_median_ms=median,
        latency_p80_ms=p80,
        samples=pack_samples(samples.seconds),
        sample_count=len(samples.seconds),
        clocks=clocks,
        metrics={name: value for name, value in more.items() if value is not None},
    )
