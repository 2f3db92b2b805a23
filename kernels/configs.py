"""Which config a launch takes, which are legal on a case, and a kernel held to one config.

A launcher that is given no config takes the one that a committed record found best for this card and bucket
(`choices.json`), and else the kernel's heuristic.  Nothing is tuned in a launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial, update_wrapper
from typing import Any

import torch

from rooflab.kernels.choices import card, rows_of, tuned
from rooflab.kernels.registry import Kernel, registered
from rooflab.kernels.tuning import Tuning
from rooflab.reference.spec import DTYPE_NAMES, Case, Scheme, get_scheme

CACHED_LAUNCHES = 4096
"""Shapes whose config is remembered: a serving engine's rows a step take this many values, and an entry is 0.5 KB."""


def tuning_of(kernel: Kernel) -> Tuning:
    """What tunes a kernel.  Raises `ValueError` where it takes no config."""
    if kernel.tuning is None:
        raise ValueError(f"kernel: expected a tunable one, got {kernel.id}, which takes no config")
    return kernel.tuning


def legal_configs(kernel: Kernel, case: Case, scheme: Scheme) -> list[Any]:
    """The configs of a tunable kernel that can run on `case`, its heuristic first, each once.

    Raises `ValueError` where the kernel takes none.
    """
    tuning = tuning_of(kernel)
    offered = dict.fromkeys((tuning.heuristic(case, scheme), *tuning.configs(case, scheme)))
    return [config for config in offered if tuning.is_legal(config, case, scheme)]


def make_config(kernel: Kernel, values: Mapping[str, Any]) -> Any:
    """The config with these `values`, of a record or of `choices.json`.  Raises `ValueError` on other fields."""
    if kernel.tuning is None:
        raise ValueError(f"config: {kernel.id} takes none, got {dict(values)}")
    names = [field.name for field in dataclasses.fields(kernel.tuning.config_type)]
    if set(values) != set(names):
        raise ValueError(f"config: {kernel.id} has {', '.join(names)}, got {', '.join(values)}")
    return kernel.tuning.config_type(**values)


def config_for(kernel: Kernel, case: Mapping[str, Any], scheme: Scheme, device: torch.device) -> Any:
    """The config of a launch on `device` that is given none; None where the kernel takes none.

    It is the card's own choice where there is one that fits this case, and else the heuristic's.  A case of which no
    key says the rows has no choice.
    """
    tuning = kernel.tuning
    if tuning is None:
        return None
    name, rows = card(device), rows_of(case)
    values = None if name is None or rows is None else tuned(kernel.op, kernel.name, name, rows, scheme.name)
    if values is not None:
        config = make_config(kernel, values)
        if tuning.is_legal(config, case, scheme):
            return config
    return tuning.heuristic(case, scheme)


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
    if kernel.tuning is None or not isinstance(config, kernel.tuning.config_type):
        raise ValueError(f"config: expected one of {kernel.id}, got {config!r}")
    pinned = update_wrapper(partial(kernel.fn, config=config), kernel.fn)
    return dataclasses.replace(kernel, fn=pinned, config=config)
