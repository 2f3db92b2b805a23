"""What a tunable kernel declares: the type of its configs, configs worth a try, legal configs, and the default.

A config is data: a flat frozen dataclass of JSON scalars.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rooflab.reference.spec import Case, Scheme, get_scheme

BF16 = get_scheme("bf16")
"""The default scheme of a GPU."""
SHARED_BYTES_PER_CTA = 227 * 1024
"""Most shared memory of a CTA on compute capability 9.0 (CUDA C++ Programming Guide, technical specifications)."""
REGISTERS_PER_THREAD = 255
"""The most that an instruction can address; the compiler spills more to memory."""
REGISTERS_PER_SM = 65536
LAUNCH_OPTIONS = ("num_warps", "num_stages")
"""Fields of a config that are Triton's launch options under these names."""


class LaunchConfig:
    """A config that makes its launch arguments; base class for Triton and Gluon kernels."""

    host_only: ClassVar[tuple[str, ...]] = ()
    """Fields that the device code does not take."""

    @cached_property
    def launch_arguments(self) -> Mapping[str, Any]:
        """The fields as keyword arguments of a launch: `block_m` as constexpr `BLOCK_M`, `num_warps` unchanged."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]  # of a derived dataclass
        return {
            name if name in LAUNCH_OPTIONS else name.upper(): getattr(self, name)
            for name in names
            if name not in self.host_only
        }


@dataclass(frozen=True)
class Footprint:
    """What one CTA needs at least, and the number of CTAs; computed from a config without compilation."""

    threads: int
    registers: int
    """Per thread, at least: accumulators and operands that live at the same time."""
    shared_bytes: int
    """Tiles that are in shared memory at the same time."""
    ctas: int
    tensor_flops: float = 0.0
    """Per CTA, with padding; 0 if the footprint does not give them."""

    @property
    def fits(self) -> bool:
        """Whether a CTA can run on Hopper without spilling registers."""
        return (
            0 < self.threads <= 1024
            and self.shared_bytes <= SHARED_BYTES_PER_CTA
            and self.registers <= REGISTERS_PER_THREAD
            and self.registers * self.threads <= REGISTERS_PER_SM
        )


@dataclass(frozen=True)
class Tuning:
    """What tunes a kernel.  Each function takes a scheme last, bf16 by default."""

    config_type: type
    """The flat frozen dataclass of the kernel's `config`."""
    configs: Callable[..., tuple[Any, ...]]
    """`configs(case, scheme=BF16)`: configs worth a try; some may be illegal."""
    heuristic: Callable[..., Any]
    """`heuristic(case, scheme=BF16)`: the config without tuning."""
    footprint: Callable[..., Footprint] | None = None
    """`footprint(config, case, scheme=BF16)`: what a launch needs, if arithmetic can tell."""
    is_legal: Callable[..., bool] = None  # type: ignore[assignment]  # `__post_init__` fills it in
    """`is_legal(config, case, scheme=BF16)`: whether a config can run; by default whether its `footprint` fits."""

    def __post_init__(self) -> None:
        if self.is_legal is None:
            if self.footprint is None:
                raise TypeError("tuning: expected is_legal, or a footprint by which configs are legal")
            object.__setattr__(self, "is_legal", legal_by(self.footprint))


def legal_by(footprint: Callable[..., Footprint]) -> Callable[..., bool]:
    """`is_legal` for a kernel that only the limits of a CTA restrict."""

    def is_legal(config: Any, case: Case, scheme: Scheme = BF16) -> bool:
        return footprint(config, case, scheme).fits

    return is_legal
