"""Readings of microkernels, the ceilings computed from them, and both as table rows and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rooflab.bench.core.ceilings.microkernels.microkernel import Unit
from rooflab.bench.core.record import L2State, Record, Status, pack_samples, unpack_samples
from rooflab.reference.spec import Scalar
from rooflab.roofline.device import Device
from rooflab.roofline.model import Ceilings

ACCESSES = ("read", "write", "copy", "triad")
NO_TENSOR_CEILING = range(100, 120)
"""Compute capabilities whose tensor cores reach their rate by tcgen05, for which there is no microkernel here."""

NO_CPU_UNIT = ("fp8_e4m3", "tf32")
"""Operand dtypes that no CPU multiplies as they are: torch widens them first."""


@dataclass(frozen=True)
class MicrokernelReading:
    """One microkernel in one launch shape, timed."""

    limit: str
    """The limit that it measures: `hbm_read`, `l2_copy`, `fma`, `bf16 wgmma shared`, `launch events`."""
    unit: Unit
    config: Mapping[str, Scalar]
    status: Status
    reason: str = ""
    """Why the status is not OK."""
    dtype: str | None = None
    """Operand dtype of matrix products."""
    work: float = 0.0
    """Units of work in the launch that was timed."""
    seconds: tuple[float, ...] = field(default=(), repr=False)
    """Samples of that launch in time order."""
    timer: str | None = None
    l2_state: L2State | None = None
    clock_hz: float | None = None
    """The SM clock held, read on the device."""
    clocks: Mapping[str, Any] | None = None
    """`ClockWatch.summary()` of the group."""

    @property
    def median_s(self) -> float | None:
        return float(np.median(self.seconds)) if self.seconds else None

    @property
    def rate_per_s(self) -> float | None:
        """Work over the median time; None where the reading may not be published, and for launches."""
        if self.status != "OK" or not self.seconds or self.unit == "launch":
            return None
        return self.work / float(np.median(self.seconds))

    @property
    def floor_s(self) -> float | None:
        """The shortest time of a launch, for launch readings."""
        return min(self.seconds) if self.unit == "launch" and self.status == "OK" and self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """JSON values, samples packed."""
        values = asdict(self)
        return values | {"config": dict(self.config), "seconds": pack_samples(self.seconds)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MicrokernelReading:
        """The inverse of `to_dict`.  Raises `ValueError` or `TypeError` on anything else."""
        return cls(**{**values, "seconds": tuple(unpack_samples(values["seconds"]))})


def best_of(readings: Iterable[MicrokernelReading]) -> dict[str, MicrokernelReading]:
    """The fastest reading of each limit, else a failed one, in order of first appearance."""
    best: dict[str, MicrokernelReading] = {}
    for reading in readings:
        known = best.setdefault(reading.limit, reading)
        if (reading.rate_per_s or 0.0) > (known.rate_per_s or 0.0):
            best[reading.limit] = reading
    return best


def better(kept: Sequence[MicrokernelReading], again: Sequence[MicrokernelReading]) -> list[MicrokernelReading]:
    """For each limit, the readings of the measurement with the higher rate or the lower launch floor."""
    found: list[MicrokernelReading] = []
    for limit in dict.fromkeys(reading.limit for reading in (*kept, *again)):
        sides = [[reading for reading in side if reading.limit == limit] for side in (again, kept)]
        best: list[MicrokernelReading] = max(sides, key=_merit)
        found += best
    return found


def _merit(readings: Sequence[MicrokernelReading]) -> float:
    rates = [reading.rate_per_s for reading in readings]
    floors = [reading.floor_s for reading in readings]
    found = [rate for rate in rates if rate] + [1 / floor for floor in floors if floor]
    return max(found, default=0.0 if readings else -1.0)


def rate_of(ceilings: Ceilings | None, limit: str, dtype: str | None) -> float | None:
    """The value in `ceilings` of a reading's limit, in its unit per second; None where there is no value."""
    if ceilings is None:
        return None
    if dtype is not None:
        return ceilings.tensor_flops_per_s.get(dtype)
    if limit.startswith("hbm_"):
        return ceilings.hbm_bytes_per_s
    if limit.startswith("l2_"):
        return ceilings.l2_bytes_per_s
    return ceilings.vector_flops_per_s if limit == "fma" else ceilings.sfu_ops_per_s


def assemble(readings: Sequence[MicrokernelReading], device: str, sm: int) -> tuple[Ceilings | None, str]:
    """The ceilings computed from the readings, or None with the missing limits.

    A rate is the best of its microkernels: for HBM over its four accesses, for a dtype over its instructions and the
    sources of their operands.  `device` is its name in `roofline.device`, or torch's.
    """
    best = best_of(readings)
    rates = {limit: reading.rate_per_s for limit, reading in best.items() if reading.rate_per_s}
    tensor: dict[str, float] = {}
    for limit, reading in best.items():
        if reading.dtype is not None and limit in rates:
            tensor[reading.dtype] = max(tensor.get(reading.dtype, 0.0), rates[limit])
    access = {name: rates[f"hbm_{name}"] for name in ACCESSES if f"hbm_{name}" in rates}
    missing = [what for what, there in (("HBM", access), ("fma", rates.get("fma"))) if not there]
    if sm in NO_TENSOR_CEILING:
        missing.append("a microkernel for this architecture's tensor cores")
    elif sm >= 80 and not tensor:
        missing.append("tensor cores")
    if missing:
        return None, f"no measured ceilings without {', '.join(missing)}"
    l2 = [rate for limit, rate in rates.items() if limit.startswith("l2_")]
    special = [rates[name] for name in ("ex2", "rsqrt") if name in rates]
    floors = {limit.split()[1]: reading.floor_s for limit, reading in best.items() if reading.floor_s is not None}
    found = Ceilings(
        device=device,
        kind="measured",
        hbm_bytes_per_s=max(access.values()),
        tensor_flops_per_s=tensor | {"fp32": rates["fma"]},
        vector_flops_per_s=rates["fma"],
        sfu_ops_per_s=max(special, default=None),
        launch_floor_s=min(floors.values(), default=0.0),
        l2_bytes_per_s=max(l2, default=None),
        access_bytes_per_s=access,
        launch_floors_s=floors,
    )
    return found, ""


def larger(a: Ceilings, b: Ceilings) -> Ceilings:
    """A CPU's ceilings with the larger of each rate, so that a busy machine lowers none; other fields from `a`."""

    def each(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}

    return replace(
        a,
        hbm_bytes_per_s=max(a.hbm_bytes_per_s, b.hbm_bytes_per_s),
        tensor_flops_per_s=each(a.tensor_flops_per_s, b.tensor_flops_per_s),
        vector_flops_per_s=max(a.vector_flops_per_s, b.vector_flops_per_s),
        access_bytes_per_s=each(a.access_bytes_per_s, b.access_bytes_per_s),
        noise=a.noise and b.noise,
    )


def with_stand_ins(measured: Ceilings) -> Ceilings:
    """A CPU's ceilings, with their best matrix rate also given to the dtypes of `NO_CPU_UNIT`."""
    rates = measured.tensor_flops_per_s
    return replace(measured, tensor_flops_per_s={**rates, **dict.fromkeys(NO_CPU_UNIT, max(rates.values()))})


def without_stand_ins(ceilings: Ceilings) -> Ceilings:
    """A CPU's ceilings with only the measured rates."""
    rates = {dtype: rate for dtype, rate in ceilings.tensor_flops_per_s.items() if dtype not in NO_CPU_UNIT}
    return replace(ceilings, tensor_flops_per_s=rates)


UNITS: Mapping[Unit, tuple[str, float]] = {
    "byte": ("TB/s", 1e12),
    "flop": ("TFLOP/s", 1e12),
    "op": ("Top/s", 1e12),
    "launch": ("us", 1e-6),
}
COLUMNS = ("limit", "measured", "datasheet", "at_clock", "unit", "reached", "clock_ghz", "how", "status", "reason")


def card_rows(readings: Sequence[MicrokernelReading], device: Device | None) -> list[dict[str, Any]]:
    """A row for each limit of a GPU: its best reading, and the data sheet's value, None where there is no value.

    `at_clock` is the data sheet's value at the SM clock held during this reading; memory has its own clock.
    `reached` is the measured value over `at_clock`, or over the data sheet's value where no clock scales it.
    `device` is None for a GPU that is in no table.
    """
    return [_card_row(reading, device) for reading in best_of(readings).values()]


def _card_row(reading: MicrokernelReading, device: Device | None) -> dict[str, Any]:
    unit, scale = UNITS[reading.unit]
    sheet = device.ceilings() if device else None
    held = None
    if device is not None and reading.clock_hz is not None:
        held = device.ceilings(min(reading.clock_hz, device.max_clock_hz))
    if reading.unit == "launch":
        measured, on_sheet, at_clock = reading.floor_s, (sheet.launch_floor_s or None) if sheet else None, None
    else:
        measured = reading.rate_per_s
        on_sheet, at_clock = (rate_of(ceilings, reading.limit, reading.dtype) for ceilings in (sheet, held))
    beside = at_clock or on_sheet
    return {
        "limit": reading.limit,
        "measured": _scaled(measured, scale),
        "datasheet": _scaled(on_sheet, scale),
        "at_clock": _scaled(at_clock, scale),
        "unit": unit,
        "reached": f"{measured / beside:.0%}" if measured and beside and reading.unit != "launch" else None,
        "clock_ghz": _scaled(reading.clock_hz, 1e9),
        "how": ", ".join(f"{name}={value}" for name, value in reading.config.items()),
        "status": reading.status,
        "reason": reading.reason,
    }


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale


def _cpu_limits(ceilings: Ceilings) -> list[tuple[str, str | None, float]]:
    """Name, dtype and rate of each limit of a CPU; bytes per second where there is no dtype."""
    found: list[tuple[str, str | None, float]] = [
        (f"memory {access}", None, rate) for access, rate in ceilings.access_bytes_per_s.items()
    ]
    found += [(f"{dtype} matrix", dtype, rate) for dtype, rate in ceilings.tensor_flops_per_s.items()]
    return [*found, ("fp32 vector", "fp32", ceilings.vector_flops_per_s)]


def _status(ceilings: Ceilings) -> Status:
    return "NOISY" if ceilings.noise else "OK"


def cpu_rows(ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each limit of a CPU; there is no data sheet of a CPU here."""
    return [
        {"limit": limit, "measured": rate / 1e9, "unit": "GFLOP/s" if dtype else "GB/s", "status": _status(ceilings)}
        for limit, dtype, rate in _cpu_limits(ceilings)
    ]


def card_records(
    readings: Sequence[MicrokernelReading], ceilings: Ceilings | None, environment: Mapping[str, Any], run_id: str
) -> list[Record]:
    """A record for each reading, failed ones included; every one holds the ceilings that they make together."""
    return [_record(reading, ceilings, environment, run_id) for reading in readings]


def _record(
    reading: MicrokernelReading, ceilings: Ceilings | None, environment: Mapping[str, Any], run_id: str
) -> Record:
    rate = reading.rate_per_s
    timed = bool(reading.seconds) and reading.status in ("OK", "INVALID")
    metrics = {"work": reading.work}
    if reading.clock_hz is not None:
        metrics["sm_clock_hz"] = reading.clock_hz
    if reading.floor_s is not None:
        metrics["launch_floor_s"] = reading.floor_s
    if reading.unit == "op" and rate is not None:
        metrics["ops_per_s"] = rate
    return Record(
        kind="ceiling",
        run_id=run_id,
        status=reading.status,
        reason=reading.reason,
        environment=environment,
        commit=environment["commit"],
        dirty=environment["dirty"],
        kernel=reading.limit,
        backend="cuda",
        scheme=reading.dtype,
        config=reading.config,
        device="cuda",
        checked_by="gpu",
        basis="measured" if timed else "bound",
        timer=reading.timer,
        l2_state=reading.l2_state,
        latency_median_ms=1e3 * (reading.median_s or 0.0) if timed else None,
        samples=pack_samples(reading.seconds) if timed else None,
        sample_count=len(reading.seconds) if timed else None,
        flops_per_s=rate if reading.unit == "flop" else None,
        bytes_per_s=rate if reading.unit == "byte" else None,
        ceilings=None if ceilings is None else asdict(ceilings),
        clocks=reading.clocks,
        metrics=metrics,
    )


def cpu_records(ceilings: Ceilings, environment: Mapping[str, Any], run_id: str) -> list[Record]:
    """A record for each limit of a CPU; only the best rate of each is known."""
    return [
        Record(
            kind="ceiling",
            run_id=run_id,
            status=_status(ceilings),
            reason=ceilings.noise,
            environment=environment,
            commit=environment["commit"],
            dirty=environment["dirty"],
            backend="torch",
            device="cpu",
            basis="measured",
            ceilings=asdict(ceilings),
            kernel=limit,
            scheme=dtype,
            flops_per_s=rate if dtype else None,
            bytes_per_s=None if dtype else rate,
        )
        for limit, dtype, rate in _cpu_limits(ceilings)
    ]
