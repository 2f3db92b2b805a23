"""What a tunable kernel declares: the type of its configs, configs worth a try, legal configs, and the default.

A config is data: a flat frozen dataclass of JSON scalars.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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


def space(config_type: type, **values: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    """`configs` of a `Tuning`: every combination of these values of the fields."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Any, ...]:
        return tuple(
            config_type(**dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())
        )

    return configs


@dataclass(frozen=True)
class Defaults:
    """`heuristic` of a `Tuning` as a table: the first row that holds for a case and whose config is legal for it.

    A row is `({"M": 64, "itemsize": 2}, config)`: it holds where each of these sizes is at most the number.  The sizes
    are those of the case, `itemsize` (bytes of an activation), and what `sizes(case, scheme)` works out.
    """

    rows: tuple[tuple[Mapping[str, int], Any], ...]
    sizes: Callable[[Case, Scheme], Mapping[str, int]] | None = None

    def __call__(self, case: Case, scheme: Scheme = BF16, *, is_legal: Callable[..., bool]) -> Any:
        """The config.  Raises `ValueError` where no row has a legal one."""
        sizes: dict[str, Any] = {"itemsize": scheme.activation.itemsize, **case}
        if self.sizes is not None:
            sizes |= self.sizes(case, scheme)
        for most, config in self.rows:
            if all(sizes[name] <= limit for name, limit in most.items()) and is_legal(config, case, scheme):
                return config
        raise ValueError(f"config: no default is legal for {case} in {scheme.name}")


@dataclass(frozen=True)
class Tuning:
    """What tunes a kernel.  Each function takes a scheme last, bf16 by default."""

    config_type: type
    """The flat frozen dataclass of the kernel's `config`."""
    configs: Callable[..., tuple[Any, ...]]
    """`configs(case, scheme=BF16)`: configs worth a try; some may be illegal."""
    heuristic: Callable[..., Any]
    """`heuristic(case, scheme=BF16)`: the config without tuning; `Defaults` makes it of a table."""
    footprint: Callable[..., Footprint] | None = None
    """`footprint(config, case, scheme=BF16)`: what a launch needs, if arithmetic can tell."""
    is_legal: Callable[..., bool] = None  # type: ignore[assignment]  # `__post_init__` fills it in
    """`is_legal(config, case, scheme=BF16)`: whether a config can run; by default whether its `footprint` fits."""

    def __post_init__(self) -> None:
        if self.is_legal is None:
            if self.footprint is None:
                raise TypeError("tuning: expected is_legal, or a footprint by which configs are legal")
            object.__setattr__(self, "is_legal", legal_by(self.footprint))
        if isinstance(self.heuristic, Defaults):
            object.__setattr__(self, "heuristic", partial(self.heuristic, is_legal=self.is_legal))


def legal_by(footprint: Callable[..., Footprint]) -> Callable[..., bool]:
    """`is_legal` for a kernel that only the limits of a CTA restrict."""

    def is_legal(config: Any, case: Case, scheme: Scheme = BF16) -> bool:
        return footprint(config, case, scheme).fits

    return is_legal
