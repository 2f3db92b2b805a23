"""Describes the roofline model: the cost of some work, and the least time that a device needs for this work.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009. Units: FLOP, bytes,
seconds; GB = 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

Basis = Literal["modelled", "counted"]
CeilingKind = Literal["datasheet", "measured", "at_clock"]


def _check_amounts(**amounts: object) -> None:
    """Raises `ValueError` if an amount, such as FLOPs or bytes, is NaN, infinite or negative."""
    for amount_name, amount in amounts.items():
        if isinstance(amount, int | float) and not (isfinite(amount) and amount >= 0):
            raise ValueError(f"{amount_name}: expected a finite number from 0 on, got {amount}")


@dataclass(frozen=True)
class Cost:
    """The least work that an op needs for given inputs, independent of the kernel.

    Every input byte is read once, and every output byte is written once. Nothing is computed twice."""

    read_bytes: float
    """The bytes that must come from HBM."""
    write_bytes: float
    """The bytes that must go to HBM."""
    tensor_flops: Mapping[str, float] = field(default_factory=dict)
    """FLOPs of products that tensor cores can compute, by operand dtype (`bf16`, `fp16`, `fp32`, `fp8_e4m3`); a
    multiply-add counts as two."""
    vector_flops: float = 0.0
    """FLOPs outside the tensor cores, in fp32."""
    sfu_ops: float = 0.0
    """The number of special-function operations: exp, log, rsqrt, reciprocal."""
    launches: int = 1
    """The least number of kernel launches."""

    def __post_init__(self) -> None:
        _check_amounts(**vars(self) | {f"tensor_flops[{dtype!r}]": flops for dtype, flops in self.tensor_flops.items()})

    @property
    def bytes(self) -> float:
        """Returns the bytes read from HBM plus the bytes written to HBM."""
        return self.read_bytes + self.write_bytes

    @property
    def flops(self) -> float:
        """Returns the FLOPs of tensor cores plus the FLOPs of vector units. `sfu_ops` are not FLOPs."""
        return sum(self.tensor_flops.values()) + self.vector_flops

    @property
    def intensity(self) -> float:
        """Returns the arithmetic intensity: FLOPs per HBM byte."""
        return self.flops / self.bytes

    def __add__(self, other: Cost) -> Cost:
        matrix_flops = dict(self.tensor_flops)
        for dtype, flops in other.tensor_flops.items():
            matrix_flops[dtype] = matrix_flops.get(dtype, 0.0) + flops
        return Cost(
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
            matrix_flops,
            self.vector_flops + other.vector_flops,
            self.sfu_ops + other.sfu_ops,
            self.launches + other.launches,
        )


@dataclass(frozen=True)
class Traffic:
    """The bytes that one kernel moves through HBM, and the number of its launches."""

    read_bytes: float
    write_bytes: float
    launches: int = 1
    basis: Basis = "modelled"
    """`modelled`: the kernel's author stated the bytes, or the bytes are the operands of the kernel's torch calls.
    `counted`: the hardware or an emulator counted the bytes."""

    def __post_init__(self) -> None:
        _check_amounts(**vars(self))

    @property
    def bytes(self) -> float:
        """Returns the bytes read from HBM plus the bytes written to HBM."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True)
class Ceilings:
    """The peak rates of one device, all from the data sheet, or all measured, or all at a given clock."""

    device: str
    kind: CeilingKind
    hbm_bytes_per_s: float
    tensor_flops_per_s: Mapping[str, float]
    """Dense matrix FLOP/s by operand dtype."""
    vector_flops_per_s: float
    """fp32 FLOP/s outside the tensor cores; a fused multiply-add counts as two."""
    sfu_ops_per_s: float | None = None
    """Special functions per second; None if the rate is not known, so that it sets no bound."""
    launch_floor_s: float = 0.0
    """The least time of one empty launch, in seconds."""
    l2_bytes_per_s: float | None = None
    """Bytes per second between the SMs and L2; None if the rate is not known."""
    access_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Measured HBM bytes per second by access: `read`, `write`, `copy`, `triad`; the highest is `hbm_bytes_per_s`."""
    launch_floors_s: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds of an empty launch by timing method; the least is `launch_floor_s`."""
    noise: str = ""
    """Why the rates are NOISY, and so may be too low; empty if nothing else ran during their measurement."""

    def matrix_rate(self, dtype: str) -> float:
        """Returns the FLOP/s of matrix products of `dtype`. Raises `ValueError` if the device has no such rate."""
        if dtype not in self.tensor_flops_per_s:
            raise ValueError(
                f"dtype: {self.device} has no {self.kind} matrix rate for {dtype!r}; "
                f"known: {', '.join(sorted(self.tensor_flops_per_s))}"
            )
        return self.tensor_flops_per_s[dtype]

    def ridge(self, dtype: str) -> float:
        """Returns the intensity (FLOP/byte) at which the compute roof of `dtype` meets the bandwidth roof."""
        return self.matrix_rate(dtype) / self.hbm_bytes_per_s

    def attainable_flops_per_s(self, intensity: float, dtype: str) -> float:
        """Returns the FLOP/s that the roofline of `dtype` allows at `intensity` FLOP/byte."""
        return min(self.matrix_rate(dtype), intensity * self.hbm_bytes_per_s)


Limiter = Literal["memory", "tensor", "vector", "sfu", "launch"]


@dataclass(frozen=True)
class Bound:
    """The least time that a device needs for some work, and the resource that limits this time."""

    seconds: float
    limiter: Limiter
    parts: Mapping[Limiter, float]
    """The seconds of each part alone.  The model assumes that all parts overlap, so the largest part is the bound."""

    def fraction(self, measured_s: float) -> float:
        """Returns bound / measured time. At 1.0 the kernel is at the roof. Above 1.0 the time or the cost is wrong."""
        return self.seconds / measured_s


def bound(cost: Cost, ceilings: Ceilings) -> Bound:
    """Returns the least time of `cost` at the rates of `ceilings`. Raises `ValueError` on a dtype without a rate."""
    times: dict[Limiter, float] = {
        "memory": cost.bytes / ceilings.hbm_bytes_per_s,
        "tensor": sum(flops / ceilings.matrix_rate(dtype) for dtype, flops in cost.tensor_flops.items()),
        "vector": cost.vector_flops / ceilings.vector_flops_per_s,
        "launch": cost.launches * ceilings.launch_floor_s,
    }
    if ceilings.sfu_ops_per_s is not None:
        times["sfu"] = cost.sfu_ops / ceilings.sfu_ops_per_s
    limiter = max(times, key=lambda part: times[part])
    return Bound(times[limiter], limiter, times)
