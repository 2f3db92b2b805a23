"""How many CTAs an SM holds at once, what limits them, and how a grid fills the GPU: waves and tail.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and the shared-memory sections of
each capability.  Allocation rules (registers by the warp, in each of four sub-partitions; 1 KiB of shared memory kept
by the driver for each CTA): those of NVIDIA's occupancy calculator, which `tests/test_occupancy.py` compiles and runs
beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rooflab.roofline.device import REGISTERS_PER_SM, Device

Resource = Literal["warps", "CTA slots", "registers", "shared memory"]

WARP = 32
MAX_THREADS_PER_CTA = 1024
MAX_REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 256
"""Registers are handed to a warp in units of this many, 8 a thread."""
SUB_PARTITIONS = 4
"""An SM's warps live in quarters, each with a quarter of the registers."""
SHARED_UNIT = 128
"""Bytes of shared memory are handed to a CTA in units of this many."""
SHARED_RESERVED = 1024
"""Bytes of each CTA's shared memory that the CUDA driver keeps for itself, from compute capability 8.0."""
_KIB = 1024
_LARGE = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)
_A100 = _LARGE[:8]
_SMALL = _LARGE[:6]


@dataclass(frozen=True)
class SmLimits:
    """What one SM of a compute capability holds at most."""

    warps: int
    ctas: int
    carveouts_kib: tuple[int, ...]
    """Sizes to which shared memory can be set, KiB, the rest of the SM's L1 data cache being cache."""
    registers: int = REGISTERS_PER_SM

    @property
    def shared_bytes(self) -> int:
        """Most shared memory that the SM's CTAs have together, the driver's part included."""
        return self.carveouts_kib[-1] * _KIB

    def carveout(self, wanted_bytes: int) -> int | None:
        """The least setting of shared memory that holds `wanted_bytes`, or None where none does."""
        return next((kib * _KIB for kib in self.carveouts_kib if kib * _KIB >= wanted_bytes), None)


# fmt: off
SM_LIMITS: Mapping[tuple[int, int], SmLimits] = {
    # warps, CTAs, settings of shared memory
    ( 8, 0): SmLimits(64, 32, _A100),
    ( 8, 6): SmLimits(48, 16, _SMALL),
    ( 8, 9): SmLimits(48, 24, _SMALL),
    ( 9, 0): SmLimits(64, 32, _LARGE),
    (10, 0): SmLimits(64, 32, _LARGE),
}
# fmt: on
"""By compute capability."""


@dataclass(frozen=True)
class Occupancy:
    """How full one SM is of CTAs of one kernel."""

    ctas_per_sm: int
    """0 where not even one fits."""
    limiter: Resource
    """What sets `ctas_per_sm`; where several do, the one that a kernel can change least."""
    warps_per_sm: int
    fraction: float
    """`warps_per_sm` over the most that the SM holds."""
    ctas_by_resource: Mapping[Resource, int]
    """CTAs that each resource alone would allow."""
    carveout_bytes: int
    """The least setting of shared memory under which these CTAs fit; what is left of 256 KiB on sm_90 is L1 cache."""


def limits_of(device: Device | tuple[int, int]) -> SmLimits:
    """What an SM of a GPU, or of a compute capability such as `(9, 0)`, holds.  Raises `ValueError` where unknown."""
    capability = device.compute_capability if isinstance(device, Device) else device
    if capability not in SM_LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in SM_LIMITS)
        raise ValueError(f"device: expected one of compute capability {known}, got {'.'.join(map(str, capability))}")
    return SM_LIMITS[capability]


def occupancy(device: Device | tuple[int, int], threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """CTAs of `threads` threads, `registers` a thread and `shared_bytes` (static and dynamic together) on one SM.

    Shared memory is taken at its largest setting, as the driver chooses it by default.  `ctas_per_sm` is 0 where a CTA
    needs more registers or shared memory than there are.  Raises `ValueError` on figures that no CTA can have.
    """
    for name, value, most in (
        ("threads", threads, MAX_THREADS_PER_CTA),
        ("registers", registers, MAX_REGISTERS_PER_THREAD),
    ):
        if not 1 <= value <= most:
            raise ValueError(f"{name}: expected 1 to {most}, got {value}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes: expected at least 0, got {shared_bytes}")
    limits = limits_of(device)
    warps = _round_up(threads, WARP) // WARP
    shared = _round_up(shared_bytes + SHARED_RESERVED, SHARED_UNIT)
    allowed: dict[Resource, int] = {
        "warps": limits.warps // warps,
        "CTA slots": limits.ctas,
        "registers": _by_registers(limits, warps, registers),
        "shared memory": limits.shared_bytes // shared,
    }
    limiter = min(allowed, key=lambda resource: allowed[resource])
    ctas = allowed[limiter]
    carveout = limits.carveout(ctas * shared)
    assert carveout is not None, "the CTAs were counted against the largest setting"
    return Occupancy(ctas, limiter, ctas * warps, ctas * warps / limits.warps, allowed, carveout)


def _by_registers(limits: SmLimits, warps: int, registers: int) -> int:
    per_warp = _round_up(registers * WARP, REGISTER_UNIT)
    # The launch is checked as if every sub-partition held as many of the CTA's warps as the fullest one.
    if _round_up(warps, SUB_PARTITIONS) * per_warp > limits.registers:
        return 0
    return limits.registers // SUB_PARTITIONS // per_warp * SUB_PARTITIONS // warps


@dataclass(frozen=True)
class Waves:
    """How a grid fills a GPU, were all its CTAs alike."""

    waves: float
    """Grid over the CTAs that run at once."""
    full: int
    """Waves with every place taken."""
    tail_ctas: int
    """CTAs of the last, partly filled wave; 0 where there is none."""
    efficiency: float
    """Places used over places held until the last wave ends: `waves` over `waves` rounded up."""
    busiest_sm_ctas: int
    """CTAs that the busiest SM runs in all.  They are dealt breadth first, one an SM before any SM has two."""
    balance: float
    """Mean CTAs an SM over those of the busiest: what the grid leaves of a rate that an SM's CTAs share."""


def waves(ctas: int, ctas_per_sm: int, sms: int) -> Waves:
    """How `ctas` CTAs run on `sms` SMs that hold `ctas_per_sm` each.  Raises `ValueError` unless all are at least 1."""
    for name, value in (("ctas", ctas), ("ctas_per_sm", ctas_per_sm), ("sms", sms)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    places = ctas_per_sm * sms
    full, tail = divmod(ctas, places)
    busiest = _round_up(ctas, sms) // sms
    return Waves(
        waves=ctas / places,
        full=full,
        tail_ctas=tail,
        efficiency=ctas / (places * (full + (tail > 0))),
        busiest_sm_ctas=busiest,
        balance=ctas / (sms * busiest),
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
