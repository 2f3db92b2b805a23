"""A reading as a record has it: its fields, and why it must not be published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from rooflab.bench.records.samples import pack_samples
from rooflab.bench.timing.plausible import implausible
from rooflab.bench.timing.timing import Samples
from rooflab.roofline.model import Bound, Ceilings, Cost


def why_invalid(
    samples: Samples, cost: Cost | None, limits: Ceilings | None, clocks: Mapping[str, Any] | None = None
) -> str | None:
    """Why a reading is INVALID, in one sentence, or None.

    In this order: a fault that the timer found, a timer that stood still, a throttled card or a time below the launch
    floor, a clock too coarse (`UNRESOLVED: ...`), and a reading above what the device can do (`limits`).
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


def reading_fields(samples: Samples, cost: Cost, moved: float, limit: Bound | None) -> dict[str, Any]:
    """The fields of a record that hold a reading; `moved` are the bytes that its rate counts.

    A timer of zero gives no rates, and samples that are no numbers no latency either; the samples are kept.
    """
    more = {
        "calls_per_sample": float(samples.calls_per_sample),
        "launch_floor_ms": None if samples.launch_floor_s is None else samples.launch_floor_s * 1e3,
        "kernel_busy_ms": None if samples.busy_s is None else samples.busy_s * 1e3,
    }
    times = {"p20": samples.p20_s, "median": samples.median_s, "p80": samples.p80_s}
    median_s = samples.median_s if math.isfinite(samples.median_s) and samples.median_s > 0 else None
    return {
        "basis": "measured",
        "timer": samples.method,
        "l2_state": samples.l2_state,
        **{f"latency_{name}_ms": value * 1e3 if math.isfinite(value) else None for name, value in times.items()},
        "samples": pack_samples(samples.seconds),
        "sample_count": len(samples.seconds),
        "flops_per_s": cost.flops / median_s if median_s else None,
        "bytes_per_s": moved / median_s if median_s else None,
        "bound_fraction": limit.fraction(median_s) if limit and median_s else None,
        "metrics": {name: value for name, value in more.items() if value is not None},
    }
