"""Configs of tunable kernels: which are legal, which one a launch takes, and a kernel held to one.

A config is data: a flat frozen dataclass of JSON scalars.  A launcher that is given none takes what a committed record
found for this card and bucket (`choices.json`), and else the kernel's heuristic.  Nothing is tuned in a launch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, update_wrapper
from typing import Any

import torch

from rooflab.kernels.choices import card, rows_of, tuned
from rooflab.kernels.registry import Kernel, registered
from rooflab.reference.spec import DTYPE_NAMES, Case, Scheme, get_scheme

BF16 = get_scheme("bf16")
"""What a GPU computes in unless told otherwise: the scheme that a config is asked for by default."""
SHARED_BYTES_PER_CTA = 227 * 1024
"""Most shared memory of a CTA on compute capability 9.0 (CUDA C++ Programming Guide, technical specifications)."""
REGISTERS_PER_THREAD = 255
"""The most that an instruction can name; beyond it the compiler spills to memory."""
REGISTERS_PER_SM = 65536
CACHED_LAUNCHES = 4096
"""Shapes whose config is remembered: a serving engine's rows a step take this many values, and an entry is 0.5 KB."""


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
    """A CTA's, its padding included; 0 where nothing says."""

    @property
    def fits(self) -> bool:
        """Whether a CTA can run on Hopper, its registers not spilled."""
        return (
            0 < self.threads <= 1024
            and self.shared_bytes <= SHARED_BYTES_PER_CTA
            and self.registers <= REGISTERS_PER_THREAD
            and self.registers * self.threads <= REGISTERS_PER_SM
        )


def legal_by(footprint: Callable[[Any, Case, Scheme], Footprint]) -> Callable[..., bool]:
    """An `is_legal` for a kernel whose only limits are those of a CTA."""

    def is_legal(config: Any, case: Case, scheme: Scheme = BF16) -> bool:
        return footprint(config, case, scheme).fits

    return is_legal


def legal_configs(kernel: Kernel, case: Case, scheme: Scheme) -> list[Any]:
    """The configs of a tunable kernel that can run on `case`, its heuristic first, each once.

    Raises `ValueError` where the kernel takes none.
    """
    if kernel.configs is None or kernel.heuristic is None or kernel.is_legal is None:
        raise ValueError(f"kernel: expected a tunable one, got {kernel.id}, which takes no config")
    found = dict.fromkeys((kernel.heuristic(case, scheme), *kernel.configs(case, scheme)))
    return [config for config in found if kernel.is_legal(config, case, scheme)]


def make_config(kernel: Kernel, values: Mapping[str, Any]) -> Any:
    """The config that `values`, of a record or of `choices.json`, says.  Raises `ValueError` on other fields."""
    if kernel.config_type is None:
        raise ValueError(f"config: {kernel.id} takes none, got {dict(values)}")
    names = [field.name for field in dataclasses.fields(kernel.config_type)]
    if set(values) != set(names):
        raise ValueError(f"config: {kernel.id} has {', '.join(names)}, got {', '.join(values)}")
    return kernel.config_type(**values)


def config_for(kernel: Kernel, case: Mapping[str, Any], scheme: Scheme, device: torch.device) -> Any:
    """What a launch on `device` takes where it is given no config; None where the kernel takes none.

    The card's own choice where there is one that fits this case, else the heuristic; a case whose rows no key names has
    no choice.
    """
    if kernel.heuristic is None or kernel.is_legal is None:
        return None
    name, rows = card(device), rows_of(case)
    found = None if name is None or rows is None else tuned(kernel.op, kernel.name, name, rows, scheme.name)
    if found is not None:
        config = make_config(kernel, found)
        if kernel.is_legal(config, case, scheme):
            return config
    return kernel.heuristic(case, scheme)


@lru_cache(maxsize=CACHED_LAUNCHES)
def default_config(op: str, kernel: str, scheme: torch.dtype | str, device: torch.device, **dims: Any) -> Any:
    """`config_for` a launcher: of its own op and name, with the dimensions of the case that its tensors show.

    `scheme` is a scheme's name, or the dtype that all tensors have.  Remembered, so that a launch pays one look into a
    table.
    """
    name = scheme if isinstance(scheme, str) else DTYPE_NAMES[scheme]
    return config_for(registered(op, kernel), Case(**dims), get_scheme(name), device)


def with_config(kernel: Kernel, config: Any) -> Kernel:
    """The kernel held to one config, its traffic too; it is not registered.  Raises `ValueError` on another's."""
    if kernel.config_type is None or not isinstance(config, kernel.config_type):
        raise ValueError(f"config: expected one of {kernel.id}, got {config!r}")
    traffic = kernel.traffic
    if traffic is not None and "config" in inspect.signature(traffic).parameters:
        traffic = partial(traffic, config=config)
    pinned = update_wrapper(partial(kernel.fn, config=config), kernel.fn)
    return dataclasses.replace(kernel, fn=pinned, traffic=traffic)
