"""Refuses what a command line names and what is not there, before torch is imported, which takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from rooflab.engine.model_files import check_model
from rooflab.kernels.names import ENTRY_POINT_GROUP, kernels_by_op
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device

OTHER_SOURCES = ("base", "compare", "good", "records")
"""Options with which ops and kernels are those of other revisions or of records."""


def check_names(given: Mapping[str, Any], places: Container[str]) -> None:
    """Raises `ValueError` on an unknown device, GPU, model, op or kernel among a command's values by name.

    `places` names its arguments: `op` is one of ours, and the option `--op` a filter.  With a file or a plug-in that
    may register others, ops and kernels are left to the registry, which refuses them later.
    """
    check_device(given.get("device"))
    if given.get("gpu"):
        get_device(given["gpu"])
    if "dummy" in given and not given.get("gpu"):
        check_model(given["model"], given["dummy"])
    elif "model" in given and "gpu" in given:
        get_architecture(given["model"])
    for op, kernel in parse_swaps(given.get("swap") or ()).items():
        check_kernel("swap", op, kernel)
    if "op" not in places or any(given.get(name) for name in OTHER_SOURCES):
        return
    ops, kernels = _listed(given["op"]), [*_listed(given.get("kernel")), *_listed(given.get("kernels"))]
    if not any(name.endswith(".py") or "::" in name for name in (*ops, *kernels)):
        for op in ops:
            check_kernel("op", op)
            for kernel in kernels:
                check_kernel("kernel", op, kernel)


def check_device(name: str | None) -> None:
    """Raises `ValueError` on the name of a device that is none."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")


def check_kernel(option: str, op: str, kernel: str | None = None) -> None:
    """Raises `ValueError` on an unknown op, or an unknown kernel of it, unless a plug-in may have registered it."""
    known = kernels_by_op()
    if "rooflab.kernels.registry" in sys.modules or entry_points(group=ENTRY_POINT_GROUP):
        return
    if op not in known:
        raise ValueError(f"{option}: expected one of {', '.join(known)}, got {op!r}")
    if kernel is not None and kernel not in known[op]:
        raise ValueError(f"{option}: {op} has {', '.join(known[op])}, got {kernel!r}")


def parse_swaps(texts: Sequence[str]) -> dict[str, str]:
    """`OP=KERNEL` texts as a mapping.  Raises `ValueError` on another form, or if an op comes twice."""
    swaps: dict[str, str] = {}
    for text in texts:
        op, separator, kernel = text.partition("=")
        if not (op and separator and kernel) or op in swaps:
            raise ValueError(f"swap: expected OP=KERNEL, each op once, got {text!r}")
        swaps[op] = kernel
    return swaps


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
