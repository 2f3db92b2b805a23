"""What a tunable kernel says of its configs: the type, those worth trying, which can run, which to take untuned.

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
"""What a GPU computes in unless told otherwise: the scheme that a config is asked for by default."""
SHARED_BYTES_PER_CTA = 227 * 1024
"""Most shared memory of a CTA on compute capability 9.0 (CUDA C++ Programming Guide, technical specifications)."""
REGISTERS_PER_THREAD = 255
"""The most that an instruction can name; beyond it the compiler spills to memory."""
REGISTERS_PER_SM = 65536
LAUNCH_OPTIONS = ("num_warps", "num_stages")
"""Fields of a config that Triton takes as options of the launch, by these names."""


class LaunchConfig:
    """A config that knows its launch arguments.  Configs of Triton and Gluon kernels derive from it."""

    host_only: ClassVar[tuple[str, ...]] = ()
    """Fields that the device code does not take."""

    @cached_property
    def launch_arguments(self) -> Mapping[str, Any]:
        """The fields as keyword arguments of a launch: `block_m` as the constexpr `BLOCK_M`, `num_warps` as it is."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]  # of a derived dataclass
        return {
            name if name in LAUNCH_OPTIONS else name.upper(): getattr(self, name)
            for name in names
            if name not in self.host_only
        }


@dataclass(frozen=True)
class Footprint:
    """What one CTA of a launch needs at least, and how many there are: arithmetic over a config, nothing compiled."""

    threads: int
    registers: int
    """A thread's, at least: accumulators and operands that live at once."""
    shared_bytes: int
    """Tiles that are staged at once."""
    ctas: int
    tensor_flops: float = 0.0
    """A CTA's, its padding included; 0 where the footprint does not know them."""

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
    """The flat frozen dataclass that the kernel's `config` is."""
    configs: Callable[..., tuple[Any, ...]]
    """`configs(case, scheme=BF16)`: those worth trying, the illegal included."""
    heuristic: Callable[..., Any]
    """`heuristic(case, scheme=BF16)`: the config where nothing was tuned."""
    footprint: Callable[..., Footprint] | None = None
    """`footprint(config, case, scheme=BF16)`: what a launch needs, where arithmetic gives it."""
    is_legal: Callable[..., bool] = None  # type: ignore[assignment]  # `__post_init__` fills it in
    """`is_legal(config, case, scheme=BF16)`: the one statement of what can run; by default what fits by `footprint`."""

    def __post_init__(self) -> None:
        if self.is_legal is None:
            if self.footprint is None:
                raise TypeError("tuning: expected is_legal, or a footprint by which configs are legal")
            object.__setattr__(self, "is_legal", legal_by(self.footprint))


def legal_by(footprint: Callable[..., Footprint]) -> Callable[..., bool]:
    """An `is_legal` for a kernel whose only limits are those of a CTA."""

    def is_legal(config: Any, case: Case, scheme: Scheme = BF16) -> bool:
        return footprint(config, case, scheme).fits

    return is_legal
