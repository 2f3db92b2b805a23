"""Which config a launch takes, which configs are legal for a case, and a kernel with a fixed config.

A launcher without a config takes the best one by a committed record for this GPU and bucket (`choices.json`), or else
the kernel's heuristic.  A launch never tunes.
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
"""Shapes whose config is remembered: enough for the row counts of a serving engine; an entry takes 0.5 KB."""


def tuning_of(kernel: Kernel) -> Tuning:
    """The tuning of a kernel.  Raises `ValueError` if the kernel takes no config."""
    if kernel.tuning is None:
        raise ValueError(f"kernel: expected a tunable one, got {kernel.id}, which takes no config")
    return kernel.tuning


def legal_configs(kernel: Kernel, case: Case, scheme: Scheme) -> list[Any]:
    """The legal configs for `case`, each once, the heuristic first.  Raises `ValueError` without a `tuning`."""
    tuning = tuning_of(kernel)
    offered = dict.fromkeys((tuning.heuristic(case, scheme), *tuning.configs(case, scheme)))
    return [config for config in offered if tuning.is_legal(config, case, scheme)]


def make_config(kernel: Kernel, values: Mapping[str, Any]) -> Any:
    """The config with these `values` (from a record or `choices.json`); a field with a default may be missing, as in a
    record from before it.  Raises `ValueError` on wrong fields."""
    if kernel.tuning is None:
        raise ValueError(f"config: {kernel.id} takes no config, got {dict(values)}")
    fields = dataclasses.fields(kernel.tuning.config_type)
    names = [field.name for field in fields]
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if not needed <= set(values) <= set(names):
        raise ValueError(f"config: {kernel.id} has {', '.join(names)}, got {', '.join(values)}")
    return kernel.tuning.config_type(**values)


def config_for(kernel: Kernel, case: Mapping[str, Any], scheme: Scheme, device: torch.device) -> Any:
    """The config for a launch on `device` that is given no config; None if the kernel takes no config.

    It is the device's own choice if that is legal for this case, or else the heuristic's.  A case without a number of
    rows has no choice.
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
    """`config_for` the launcher of `op` and `kernel`; `dims` are the dimensions of the case that its tensors show.

    `scheme` is a scheme's name, or the one dtype of all tensors.  Results are cached: a launch costs one look-up.
    """
    name = scheme if isinstance(scheme, str) else DTYPE_NAMES[scheme]
    return config_for(registered(op, kernel), Case(**dims), get_scheme(name), device)


def with_config(kernel: Kernel, config: Any) -> Kernel:
    """The kernel with a fixed config, also for its traffic; not registered.  Raises `ValueError` on another type."""
    if kernel.tuning is None or not isinstance(config, kernel.tuning.config_type):
        raise ValueError(f"config: expected one of {kernel.id}, got {config!r}")
    pinned = update_wrapper(partial(kernel.fn, config=config), kernel.fn)
    return dataclasses.replace(kernel, fn=pinned, config=config)
