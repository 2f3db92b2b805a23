"""Splits a kernel's time into the least possible time and the causes of the additional time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.predict import model
from rooflab.bench.predict.model import TimeStep
from rooflab.bench.predict.predictions import Predicted, predict_all
from rooflab.bench.predict.public import UNCALIBRATED, error_text
from rooflab.bench.predict.work import LaunchWork
from rooflab.roofline.device import Device
from rooflab.roofline.model import Limiter, Traffic
from rooflab.roofline.numbers import three_digits

UNEXPLAINED = "not explained"
"""The name of the part that is the measured time minus the predicted time."""
UNREAD = "its code was not read"
"""Why a library's time is a bound and no prediction: all libraries with the same bytes would get the same time."""


@dataclass(frozen=True)
class Explanation:
    """Explains the time of one kernel on one case (input shape).  If there is no explanation, `reason` says why."""

    target: KernelCase
    role: str
    gpu: str
    bytes: float
    """The HBM bytes that the kernel moves."""
    least_bytes: float
    flops: float
    launches: int
    traffic_basis: str
    """How `bytes` are known: `modelled`, `counted`, or `least` if the kernel's traffic is unknown."""
    bound_ms: float | None = None
    limiter: Limiter | None = None
    parts: tuple[TimeStep, ...] = ()
    predicted_ms: float | None = None
    """The predicted time.  None if no compiled code was read; the parts then sum to a bound."""
    calibration: str = UNCALIBRATED
    """The error of the predictor on this kind of kernel, in words."""
    measured_ms: float | None = None
    compiled: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""

    @property
    def total_ms(self) -> float | None:
        """Returns the sum of the parts: the measured time, or else the predicted time, or else the roofline bound."""
        return self.measured_ms if self.measured_ms is not None else self.modelled_ms

    @property
    def modelled_ms(self) -> float | None:
        """Returns the predicted time, or the roofline bound without compiled code, or None without explanation."""
        times_ms = [time_step.ms for time_step in self.parts if time_step.name != UNEXPLAINED]
        return math.fsum(times_ms) if times_ms else None

    @property
    def kind(self) -> str:
        """Returns the kind of `total_ms`: `measured`, `predicted` or `bound`."""
        return "measured" if self.measured_ms is not None else "bound" if self.predicted_ms is None else "predicted"

    @property
    def intensity(self) -> float | None:
        """Returns the FLOPs per moved byte."""
        return self.flops / self.bytes if self.bytes else None

    def sentence(self) -> str:
        """Returns a sentence that names the largest part of the time above the least possible time."""
        name = f"{self.target.op}/{self.target.kernel}"
        if not self.parts or not self.total_ms:
            return f"{name}: {self.reason}"
        least_work, *gap = self.parts
        largest = max(gap, key=lambda part: part.ms)
        return (
            f"Of {name}'s {self.kind} {_us(self.total_ms)} the least work is {least_work.ms / self.total_ms:.0%}; "
            f"the largest part of the rest is {largest.name}, "
            f"{_us(largest.ms)} ({largest.ms / self.total_ms:.0%}): {largest.why}."
        )

    def rows(self) -> list[dict[str, Any]]:
        """Returns one table row for each part of the time, and a row for the sum."""
        total = self.total_ms or 0.0
        rows = [
            {
                "part": time_step.name,
                "us": time_step.ms * 1e3,
                "share": f"{time_step.ms / total:.0%}" if total else "",
                "why": time_step.why,
            }
            for time_step in self.parts
        ]
        sum_kind = self.kind if self.measured_ms is not None else f"{self.kind}, {self.calibration}"
        return [*rows, {"part": "sum", "us": total * 1e3, "share": "", "why": sum_kind}]

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole explanation as JSON values."""
        target = self.target
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("target", "flops")}
        return fields | {
            "op": target.op,
            "kernel": target.kernel,
            "case": target.case.id,
            "scheme": target.scheme.name,
            "intensity": self.intensity,
            "parts": [{"part": time_step.name, "ms": time_step.ms, "why": time_step.why} for time_step in self.parts],
            "compiled": [dict(entry) for entry in self.compiled],
            "sentence": self.sentence(),
        }


def _us(ms: float) -> str:
    return f"{three_digits(ms * 1e3)} us" if ms < 1 else f"{three_digits(ms)} ms"


def explain(
    targets: Sequence[KernelCase],
    device: Device,
    measured_ms: Mapping[KernelCase, float] | None = None,
    counted: Mapping[KernelCase, Traffic] | None = None,
) -> list[Explanation]:
    """Explains the time of every target on `device`, in order.  The parts of a measured time sum to this time."""
    answers = predict_all(targets, device, counted=counted)
    measured_ms = measured_ms or {}
    return [explained(answer, device, measured_ms.get(answer.target)) for answer in answers]


def explained(answer: Predicted, device: Device, measured_ms: float | None) -> Explanation:
    """Returns the explanation for a prediction.  A launcher that is not registered counts as an optimized kernel."""
    target, cost, traffic = answer.target, answer.cost, answer.traffic
    fields: dict[str, Any] = {
        "target": target,
        "role": target.registered.role,
        "gpu": device.name,
        "bytes": traffic.bytes if traffic else cost.bytes,
        "least_bytes": cost.bytes,
        "flops": cost.flops,
        "traffic_basis": traffic.basis if traffic else "least",
    }
    if answer.prediction is None:
        launches = traffic.launches if traffic else cost.launches
        return Explanation(**fields, launches=launches, reason=answer.reason)
    prediction = answer.prediction
    words = error_text(target.op, cost) if prediction.works else UNREAD
    parts, modelled_ms = prediction.steps, prediction.seconds * 1e3
    if measured_ms is not None:
        times = f"{measured_ms / modelled_ms:.2f} times {'predicted' if prediction.works else 'the bound'}"
        parts += (TimeStep(UNEXPLAINED, measured_ms / 1e3 - prediction.seconds, f"measured is {times}, {words}"),)
    return Explanation(
        **fields,
        launches=prediction.launches,
        bound_ms=prediction.bound.seconds * 1e3,
        limiter=prediction.bound.limiter,
        parts=parts,
        predicted_ms=modelled_ms if prediction.works else None,
        calibration=words,
        measured_ms=measured_ms,
        compiled=tuple(_compiled_row(work) for work in prediction.works),
    )


def _compiled_row(work: LaunchWork) -> dict[str, Any]:
    return {
        "name": work.name,
        "launches": work.launches,
        "ctas": work.ctas,
        "ctas_per_sm": work.occupancy.ctas_per_sm,
        "occupancy_limiter": work.occupancy.limiter,
        "occupancy": work.occupancy.fraction,
        "waves": work.waves.waves,
        "tail_ctas": work.waves.tail_ctas,
        "wave_efficiency": work.waves.efficiency,
        "loop_turns": work.turns,
        "bytes_in_flight_per_cta": work.in_flight_bytes,
        "pipe_cycles_per_cta": dict(work.pipe_cycles),
        "dependent_cycles_per_cta": work.cta_cycles,
    }


_COLUMNS = {
    model.LEAST_WORK: "least",
    model.LAUNCH: "launch",
    model.SUSTAINED: "sustained",
    model.BYTES: "bytes",
    model.PIPE: "pipe",
    model.WAVES: "waves",
    model.LATENCY: "latency",
    UNEXPLAINED: "rest",
}
WHY_COLUMNS = (
    *("kernel", "role", "launches", "mbytes", "over_least", "flop_per_byte", "predicted_us", "measured_us"),
    *_COLUMNS.values(),
    "reason",
)


def why_rows(explanations: Iterable[Explanation]) -> list[dict[str, Any]]:
    """Returns one row per kernel, in the given order: bytes, launches, intensity, and parts of its time in µs."""
    rows = []
    for entry in explanations:
        row: dict[str, Any] = {
            "kernel": entry.target.kernel,
            "role": entry.role,
            "launches": entry.launches,
            "mbytes": entry.bytes / 1e6,
            "over_least": entry.bytes / entry.least_bytes if entry.least_bytes else None,
            "flop_per_byte": entry.intensity,
            "predicted_us": None if entry.predicted_ms is None else entry.predicted_ms * 1e3,
            "measured_us": None if entry.measured_ms is None else entry.measured_ms * 1e3,
            "reason": entry.reason,
        }
        if entry.modelled_ms is not None and entry.predicted_ms is None:
            row["reason"] = f"bound {_us(entry.modelled_ms)}; {UNREAD}"
        rows.append(row | {_COLUMNS[time_step.name]: time_step.ms * 1e3 for time_step in entry.parts})
    return rows


def why_sentence(explanations: Sequence[Explanation]) -> str:
    """Returns a sentence that compares the fastest optimized kernel with the naive kernel.  It names the speedup and
    the part of the time that shrinks most.

    Compares measured times if the naive kernel and an optimized kernel have them.  Otherwise compares predicted times.
    The two kinds of times are never mixed."""
    naive = next((entry for entry in explanations if entry.role == "naive"), None)
    optimized = [entry for entry in explanations if entry.role == "optimized"]
    measured = naive is not None and naive.measured_ms is not None and any(entry.measured_ms for entry in optimized)
    times = {entry.target: entry.measured_ms if measured else entry.predicted_ms for entry in explanations}
    if naive is not None and not measured:
        times[naive.target] = naive.modelled_ms
    optimized = [entry for entry in optimized if times[entry.target]]
    before_ms = times[naive.target] if naive is not None else None
    if naive is None or not before_ms or not optimized:
        return "There is no naive and optimized kernel to compare on this case."
    best = min(optimized, key=lambda entry: times[entry.target] or 0.0)
    after_ms = times[best.target]
    assert after_ms, "those without a time were left out"
    naive_parts, best_parts = (
        {part.name: part.ms for part in entry.parts if measured or part.name != UNEXPLAINED} for entry in (naive, best)
    )
    gains = {name: ms - best_parts.get(name, 0.0) for name, ms in naive_parts.items()}
    name = max(gains, key=lambda part: gains[part])
    kind = "measured" if measured else "predicted"
    speed = "naive's speed" if measured or naive.predicted_ms is not None else "the speed of naive's bound"
    return (
        f"{best.target.kernel} is {kind} at {before_ms / after_ms:.3g} times {speed}; most of what it "
        f"saves is {name}, {_us(gains[name])} of {_us(before_ms - after_ms)}."
    )
