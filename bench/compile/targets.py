"""What code can be compiled for: `--target sm_90a`, and the GPU whose SMs its grid is laid over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooflab.roofline.device import Device, get_device
from rooflab.roofline.occupancy import MAX_THREADS_PER_CTA, SHARED_RESERVED, WARP, limits_of


@dataclass(frozen=True)
class Target:
    """One architecture, as the compilers name it."""

    name: str
    """`sm_90a`; the `a` is the architecture's own instructions, wgmma for one, which no later GPU runs."""
    sm: int
    gpu: str
    """The GPU that stands for it: its SMs, registers and shared memory."""

    @property
    def device(self) -> Device:
        """The GPU's data."""
        return get_device(self.gpu)

    def properties(self) -> dict[str, int]:
        """What a launcher may ask Triton's driver for, of the GPU that stands for the target."""
        limits = limits_of(self.device)
        return {
            "multiprocessor_count": self.device.sms,
            "max_shared_mem": limits.shared_bytes - SHARED_RESERVED,
            "max_num_regs": limits.registers,
            "warpSize": WARP,
            "max_threads_per_block": MAX_THREADS_PER_CTA,
            "max_threads_per_sm": limits.warps * WARP,
        }


# From the GPUs of roofline/device.py, one an architecture. Triton takes the `a` by itself from sm_90 on.
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", 80, "a100-80gb"),
        Target("sm_89", 89, "l40s"),
        Target("sm_90a", 90, "h100-sxm"),
        Target("sm_100a", 100, "b200"),
    )
}
"""Every target by name."""
DEFAULT = TARGETS["sm_90a"]


def get_target(name: str) -> Target:
    """The target called `name`.  Raises `ValueError` naming those there are."""
    if name not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def device_for(target: Target, gpu: str | None) -> Device:
    """The GPU called `gpu`, or the one that stands for the target.

    Raises `ValueError` on an unknown one, and on one of another compute capability, which does not run the code.
    """
    device = get_device(gpu) if gpu else target.device
    major, minor = device.compute_capability
    if 10 * major + minor != target.sm:
        raise ValueError(
            f"gpu: expected one that runs {target.name}, got {device.name}, which is sm_{10 * major + minor}"
        )
    return device
