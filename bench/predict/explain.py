"""Splits a kernel's time into parts: the least possible time, and the causes of the additional time."""

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

UNEXPLAINED_PART = "not explained"
"""The name of the part that is the measured time minus the predicted time."""
NO_CODE_REASON = "its code was not read"
"""Why a library's time is a bound and no prediction: all libraries with the same bytes would get the same time."""


@dataclass(frozen=True)
class Explanation:
    """Explains the time of one kernel on one case (input shape).  If this is impossible, `reason` says why."""

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
        """Returns the kernel's predicted ms (the roofline bound if its code was not read), or None if there is none."""
        times_ms = [time_step.ms for time_step in self.parts if time_step.name != UNEXPLAINED_PART]
        return math.fsum(times_ms) if times_ms else None

    @property
    def kind(self) -> str:
        """Returns what `total_ms` is: a `measured` time, a `predicted` time or a `bound`."""
        return "measured" if self.measured_ms is not None else "bound" if self.predicted_ms is None else "predicted"

    @property
    def intensity(self) -> float | None:
        """Returns the FLOPs per byte that the kernel moves.  Returns None if the kernel moves no bytes."""
        return self.flops / self.bytes if self.bytes else None

    def sentence(self) -> str:
        """Returns a sentence that says how much of the time is least work, and which other part is the largest."""
        name = f"{self.target.op}/{self.target.kernel}"
        if not self.parts or not self.total_ms:
            return f"{name}: {self.reason}"
        roofline_part, *other_parts = self.parts
        largest_part = max(other_parts, key=lambda part: part.ms)
        return (
            f"Of {name}'s {self.kind} {_us(self.total_ms)} the least work is {roofline_part.ms / self.total_ms:.0%}; "
            f"the largest part of the rest is {largest_part.name}, "
            f"{_us(largest_part.ms)} ({largest_part.ms / self.total_ms:.0%}): {largest_part.why}."
        )

    def rows(self) -> list[dict[str, Any]]:
        """Returns one table row for each part of the time, and a row for the sum."""
        sum_ms = self.total_ms or 0.0
        rows = [
            {
                "part": time_step.name,
                "us": time_step.ms * 1e3,
                "share": f"{time_step.ms / sum_ms:.0%}" if sum_ms else "",
                "why": time_step.why,
            }
            for time_step in self.parts
        ]
        sum_reason = self.kind if self.measured_ms is not None else f"{self.kind}, {self.calibration}"
        return [*rows, {"part": "sum", "us": sum_ms * 1e3, "share": "", "why": sum_reason}]

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole explanation as JSON values."""
        target = self.target
        explanation_fields = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("target", "flops")
        }
        return explanation_fields | {
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
    """Explains the time of each target (kernel, case, dtypes) on `device`.  The parts sum to the measured time."""
    predictions = predict_all(targets, device, counted=counted)
    measured_ms = measured_ms or {}
    return [explained(prediction, device, measured_ms.get(prediction.target)) for prediction in predictions]


def explained(answer: Predicted, device: Device, measured_ms: float | None) -> Explanation:
    """Makes the explanation of a kernel's time: it splits the predicted time into parts.  With `measured_ms`, one more
    part holds the measured time minus the predicted time."""
    target, least_cost, traffic = answer.target, answer.cost, answer.traffic
    field_values: dict[str, Any] = {
        "target": target,
        "role": target.registered.role,
        "gpu": device.name,
        "bytes": traffic.bytes if traffic else least_cost.bytes,
        "least_bytes": least_cost.bytes,
        "flops": least_cost.flops,
        "traffic_basis": traffic.basis if traffic else "least",
    }
    if answer.prediction is None:
        launches = traffic.launches if traffic else least_cost.launches
        return Explanation(**field_values, launches=launches, reason=answer.reason)
    prediction = answer.prediction
    accuracy = error_text(target.op, least_cost) if prediction.works else NO_CODE_REASON
    parts, modelled_ms = prediction.steps, prediction.seconds * 1e3
    if measured_ms is not None:
        ratio_text = f"{measured_ms / modelled_ms:.2f} times {'predicted' if prediction.works else 'the bound'}"
        parts += (
            TimeStep(UNEXPLAINED_PART, measured_ms / 1e3 - prediction.seconds, f"measured is {ratio_text}, {accuracy}"),
        )
    return Explanation(
        **field_values,
        launches=prediction.launches,
        bound_ms=prediction.bound.seconds * 1e3,
        limiter=prediction.bound.limiter,
        parts=parts,
        predicted_ms=modelled_ms if prediction.works else None,
        calibration=accuracy,
        measured_ms=measured_ms,
        compiled=tuple(_compiled_row(launch_work) for launch_work in prediction.works),
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


_COLUMN_BY_PART = {
    model.LEAST_WORK: "least",
    model.LAUNCH: "launch",
    model.SUSTAINED: "sustained",
    model.BYTES: "bytes",
    model.PIPE: "pipe",
    model.WAVES: "waves",
    model.LATENCY: "latency",
    UNEXPLAINED_PART: "rest",
}
WHY_COLUMNS = (
    *("kernel", "role", "launches", "mbytes", "over_least", "flop_per_byte", "predicted_us", "measured_us"),
    *_COLUMN_BY_PART.values(),
    "reason",
)


def why_rows(explanations: Iterable[Explanation]) -> list[dict[str, Any]]:
    """Returns one table row per kernel: bytes, launches, FLOPs per byte, and the parts of its time in µs."""
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
            row["reason"] = f"bound {_us(entry.modelled_ms)}; {NO_CODE_REASON}"
        rows.append(row | {_COLUMN_BY_PART[time_step.name]: time_step.ms * 1e3 for time_step in entry.parts})
    return rows
