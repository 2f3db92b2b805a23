"""Readings of microkernels: what each says, whether it can be true, and the ceilings that they make together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rooflab.bench.ceilings.microkernels.microkernel import Unit
from rooflab.bench.records.record import L2State, Status
from rooflab.bench.records.samples import pack_samples, unpack_samples
from rooflab.reference.spec import Scalar
from rooflab.roofline.model import Ceilings

ACCESSES = ("read", "write", "copy", "triad")
NO_TENSOR_CEILING = range(100, 120)
"""Compute capabilities whose tensor cores reach their rate by tcgen05, for which there is no microkernel here."""

NO_CPU_UNIT = ("fp8_e4m3", "tf32")
"""Operand dtypes that no CPU multiplies as they are: torch widens them first."""


@dataclass(frozen=True)
class Reading:
    """One microkernel in one launch shape, timed."""

    limit: str
    """What it finds out: `hbm_read`, `l2_copy`, `fma`, `bf16 wgmma shared`, `launch events`."""
    unit: Unit
    config: Mapping[str, Scalar]
    status: Status
    reason: str = ""
    """Why the status is not OK."""
    dtype: str | None = None
    """Of matrix products."""
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
        """Median time of the launch."""
        return float(np.median(self.seconds)) if self.seconds else None

    @property
    def rate_per_s(self) -> float | None:
        """Work over the median time; None where the reading may not be published, and for launches."""
        if self.status != "OK" or not self.seconds or self.unit == "launch":
            return None
        return self.work / float(np.median(self.seconds))

    @property
    def floor_s(self) -> float | None:
        """For a launch, the least time of one."""
        return min(self.seconds) if self.unit == "launch" and self.status == "OK" and self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """JSON values, samples packed."""
        values = asdict(self)
        return values | {"config": dict(self.config), "seconds": pack_samples(self.seconds)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Reading:
        """The inverse of `to_dict`.  Raises `ValueError` or `TypeError` on anything else."""
        return cls(**{**values, "seconds": tuple(unpack_samples(values["seconds"]))})


def best_of(readings: Iterable[Reading]) -> dict[str, Reading]:
    """The reading that counts of each limit, in order of first appearance: the fastest, or one that failed."""
    best: dict[str, Reading] = {}
    for reading in readings:
        known = best.setdefault(reading.limit, reading)
        if (reading.rate_per_s or 0.0) > (known.rate_per_s or 0.0):
            best[reading.limit] = reading
    return best


def better(kept: Sequence[Reading], again: Sequence[Reading]) -> list[Reading]:
    """Of each limit the readings of the measurement that found the higher rate, or the lower launch floor."""
    found: list[Reading] = []
    for limit in dict.fromkeys(reading.limit for reading in (*kept, *again)):
        sides = [[reading for reading in side if reading.limit == limit] for side in (again, kept)]
        best: list[Reading] = max(sides, key=_merit)
        found += best
    return found


def _merit(readings: Sequence[Reading]) -> float:
    rates = [reading.rate_per_s for reading in readings]
    floors = [reading.floor_s for reading in readings]
    found = [rate for rate in rates if rate] + [1 / floor for floor in floors if floor]
    return max(found, default=0.0 if readings else -1.0)


def rate_of(ceilings: Ceilings | None, limit: str, dtype: str | None) -> float | None:
    """What `ceilings` say of a reading's limit, in its unit per second; None where they say nothing."""
    if ceilings is None:
        return None
    if dtype is not None:
        return ceilings.tensor_flops_per_s.get(dtype)
    if limit.startswith("hbm_"):
        return ceilings.hbm_bytes_per_s
    if limit.startswith("l2_"):
        return ceilings.l2_bytes_per_s
    return ceilings.vector_flops_per_s if limit == "fma" else ceilings.sfu_ops_per_s


def assemble(readings: Sequence[Reading], device: str, sm: int) -> tuple[Ceilings | None, str]:
    """The ceilings that the readings make, or None with what is missing.

    A rate is the best of its microkernels: HBM's of its four accesses, a dtype's of its instructions and of where
    their operands come from.  `device` is its name in `roofline.device`, or torch's.
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
    """The larger of each rate and the lesser of each floor: a busy or a hot machine lowers none.  The rest is `a`'s."""

    def most(one: float | None, other: float | None) -> float | None:
        return max((rate for rate in (one, other) if rate is not None), default=None)

    def each(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}

    floors = dict(a.launch_floors_s)
    for name, floor in b.launch_floors_s.items():
        floors[name] = min(floor, floors.get(name, floor))
    return Ceilings(
        device=a.device,
        kind=a.kind,
        hbm_bytes_per_s=max(a.hbm_bytes_per_s, b.hbm_bytes_per_s),
        tensor_flops_per_s=each(a.tensor_flops_per_s, b.tensor_flops_per_s),
        vector_flops_per_s=max(a.vector_flops_per_s, b.vector_flops_per_s),
        sfu_ops_per_s=most(a.sfu_ops_per_s, b.sfu_ops_per_s),
        launch_floor_s=min((floor for floor in (a.launch_floor_s, b.launch_floor_s) if floor), default=0.0),
        l2_bytes_per_s=most(a.l2_bytes_per_s, b.l2_bytes_per_s),
        access_bytes_per_s=each(a.access_bytes_per_s, b.access_bytes_per_s),
        launch_floors_s=floors,
    )


def with_stand_ins(measured: Ceilings) -> Ceilings:
    """A CPU's ceilings with the best of their matrix rates for the dtypes of `NO_CPU_UNIT` too."""
    rates = measured.tensor_flops_per_s
    return replace(measured, tensor_flops_per_s={**rates, **dict.fromkeys(NO_CPU_UNIT, max(rates.values()))})


def without_stand_ins(ceilings: Ceilings) -> Ceilings:
    """A CPU's ceilings with the rates alone that were measured."""
    rates = {dtype: rate for dtype, rate in ceilings.tensor_flops_per_s.items() if dtype not in NO_CPU_UNIT}
    return replace(ceilings, tensor_flops_per_s=rates)
