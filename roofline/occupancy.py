"""Computes how many CTAs an SM holds at once, which resource limits this number, and in how many waves a grid runs.

The limits are from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". The allocation
rules are those of NVIDIA's occupancy calculator. Registers are allocated by warp, in four sub-partitions. The driver
uses 1 KiB of shared memory for each CTA. `tests/predict/test_occupancy.py` compares the results with NVIDIA's
calculator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rooflab.roofline.device import REGISTERS_PER_SM, Device

Resource = Literal["warps", "CTA slots", "registers", "shared memory"]

WARP_THREADS = 32
MAX_THREADS_PER_CTA = 1024
MAX_REGISTERS_PER_THREAD = 255
REGISTER_ALLOCATION_UNIT = 256
"""The number of registers in a unit of allocation.  A warp gets whole units; a unit is 8 registers per thread."""
SUB_PARTITIONS_PER_SM = 4
"""The number of sub-partitions of an SM; each has an equal share of the warps and of the registers."""
SHARED_ALLOCATION_BYTES = 128
"""The bytes in a unit of allocation.  A CTA gets whole units of shared memory."""
SHARED_RESERVED = 1024
"""Bytes of each CTA's shared memory that the CUDA driver keeps for itself, from compute capability 8.0."""
_KIB = 1024
_CARVEOUTS_KIB = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)
_A100_CARVEOUTS_KIB = _CARVEOUTS_KIB[:8]
_SMALL_CARVEOUTS_KIB = _CARVEOUTS_KIB[:6]


@dataclass(frozen=True)
class SmLimits:
    """The limits of one SM, for one compute capability."""

    warps: int
    ctas: int
    carveouts_kib: tuple[int, ...]
    """The possible sizes of shared memory, in KiB.  The rest of the memory is the SM's L1 data cache."""
    registers: int = REGISTERS_PER_SM

    @property
    def shared_bytes(self) -> int:
        """Returns the largest shared-memory size of one SM in bytes, including the driver's part."""
        return self.carveouts_kib[-1] * _KIB

    @property
    def shared_bytes_per_cta(self) -> int:
        """Returns the most bytes of shared memory that one CTA can use."""
        return self.shared_bytes - SHARED_RESERVED

    def carveout(self, wanted_bytes: int) -> int | None:
        """Returns the smallest shared-memory size that holds `wanted_bytes`, or None if no size is large enough."""
        return next((size_kib * _KIB for size_kib in self.carveouts_kib if size_kib * _KIB >= wanted_bytes), None)


# fmt: off
SM_LIMITS: Mapping[tuple[int, int], SmLimits] = {
    # warps, CTAs, sizes of shared memory
    ( 8, 0): SmLimits(64, 32, _A100_CARVEOUTS_KIB),
    ( 8, 6): SmLimits(48, 16, _SMALL_CARVEOUTS_KIB),
    ( 8, 9): SmLimits(48, 24, _SMALL_CARVEOUTS_KIB),
    ( 9, 0): SmLimits(64, 32, _CARVEOUTS_KIB),
    (10, 0): SmLimits(64, 32, _CARVEOUTS_KIB),
}
# fmt: on
"""The limits of an SM, by compute capability."""
HOPPER = SM_LIMITS[9, 0]


@dataclass(frozen=True)
class Occupancy:
    """The number of CTAs of one kernel that an SM holds at once, and the resource that limits this number."""

    ctas_per_sm: int
    """The number of CTAs that an SM holds at once; 0 if not even one CTA fits."""
    limiter: Resource
    """The resource that limits `ctas_per_sm`.  If several do, the resource that a kernel can change least."""
    warps_per_sm: int
    fraction: float
    """The occupancy: `warps_per_sm` divided by the largest number of warps of the SM."""
    ctas_by_resource: Mapping[Resource, int]
    """The number of CTAs that each resource alone would allow."""
    carveout_bytes: int
    """The least size of shared memory, in bytes, that holds these CTAs; the rest of sm_90's 256 KiB is L1 cache."""


def limits_of(device: Device | tuple[int, int]) -> SmLimits:
    """Returns an SM's limits, for a GPU or a compute capability such as `(9, 0)`. Raises `ValueError` if unknown."""
    capability = device.compute_capability if isinstance(device, Device) else device
    if capability not in SM_LIMITS:
        versions = ", ".join(f"{major}.{minor}" for major, minor in SM_LIMITS)
        raise ValueError(f"device: expected one of compute capability {versions}, got {'.'.join(map(str, capability))}")
    return SM_LIMITS[capability]


def occupancy(device: Device | tuple[int, int], threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Computes how many CTAs one SM holds at once.

    A CTA has `threads` threads with `registers` registers each, and `shared_bytes` of static plus dynamic shared
    memory. The SM has its largest shared-memory setting. `ctas_per_sm` is 0 if not even one CTA fits. Raises
    `ValueError` on values that no CTA can have."""
    for amount_name, amount, max_amount in (
        ("threads", threads, MAX_THREADS_PER_CTA),
        ("registers", registers, MAX_REGISTERS_PER_THREAD),
    ):
        if not 1 <= amount <= max_amount:
            raise ValueError(f"{amount_name}: expected 1 to {max_amount}, got {amount}")
    if shared_bytes < 0:
        raise ValueError(f"shared_bytes: expected at least 0, got {shared_bytes}")
    sm_limits = limits_of(device)
    warps = _round_up(threads, WARP_THREADS) // WARP_THREADS
    cta_shared_bytes = _round_up(shared_bytes + SHARED_RESERVED, SHARED_ALLOCATION_BYTES)
    ctas_by_resource: dict[Resource, int] = {
        "warps": sm_limits.warps // warps,
        "CTA slots": sm_limits.ctas,
        "registers": _by_registers(sm_limits, warps, registers),
        "shared memory": sm_limits.shared_bytes // cta_shared_bytes,
    }
    limiter = min(ctas_by_resource, key=lambda resource: ctas_by_resource[resource])
    ctas = ctas_by_resource[limiter]
    carveout = sm_limits.carveout(ctas * cta_shared_bytes)
    assert carveout is not None, "the CTAs were counted against the largest setting"
    return Occupancy(ctas, limiter, ctas * warps, ctas * warps / sm_limits.warps, ctas_by_resource, carveout)


def _by_registers(limits: SmLimits, warps: int, registers: int) -> int:
    registers_per_warp = _round_up(registers * WARP_THREADS, REGISTER_ALLOCATION_UNIT)
    # The launch check assumes that every sub-partition holds as many of the CTA's warps as the fullest one.
    if _round_up(warps, SUB_PARTITIONS_PER_SM) * registers_per_warp > limits.registers:
        return 0
    return limits.registers // SUB_PARTITIONS_PER_SM // registers_per_warp * SUB_PARTITIONS_PER_SM // warps


@dataclass(frozen=True)
class Waves:
    """The waves in which the CTAs of a grid run on a GPU, if all CTAs take the same time."""

    waves: float
    """The number of waves: the CTAs of the grid, divided by the CTAs that run at once."""
    full: int
    """The number of waves that fill the GPU."""
    tail_ctas: int
    """The number of CTAs of the last, partly filled wave; 0 if the last wave is full."""
    efficiency: float
    """The used share of the GPU's CTA slots until the last wave ends: `waves` divided by `waves` rounded up."""
    busiest_sm_ctas: int
    """The number of CTAs that the busiest SM runs.  Each SM gets one CTA before any SM gets two."""
    balance: float
    """The mean number of CTAs per SM / `busiest_sm_ctas`: the share of an SM's rate that the grid can use."""


def waves(ctas: int, ctas_per_sm: int, sms: int) -> Waves:
    """Returns the waves of `ctas` CTAs if each of `sms` SMs holds `ctas_per_sm`. Raises `ValueError` on values < 1."""
    for amount_name, amount in (("ctas", ctas), ("ctas_per_sm", ctas_per_sm), ("sms", sms)):
        if amount < 1:
            raise ValueError(f"{amount_name}: expected at least 1, got {amount}")
    cta_slots = ctas_per_sm * sms
    full_waves, tail_ctas = divmod(ctas, cta_slots)
    busiest_sm_ctas = _round_up(ctas, sms) // sms
    return Waves(
        waves=ctas / cta_slots,
        full=full_waves,
        tail_ctas=tail_ctas,
        efficiency=ctas / (cta_slots * (full_waves + (tail_ctas > 0))),
        busiest_sm_ctas=busiest_sm_ctas,
        balance=ctas / (sms * busiest_sm_ctas),
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
