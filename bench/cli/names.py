"""What a command line does before torch is imported, which takes seconds: refuses wrong names, sets Triton's mode."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Container, Sequence
from importlib.metadata import entry_points, version
from pathlib import Path

from rooflab.bench.base.plain import JsonObject
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.names import values_by_name

OTHER_SOURCES = ("base", "compare", "good", "records")
"""Options with which ops and kernels are those of other revisions or of records."""


def check_names(given: JsonObject, arguments: Container[str]) -> None:
    """Raises `ValueError` on an empty name, or an unknown device, GPU, model, op or kernel, among a command's values.

    `arguments`: those without an option, for `--op` is a filter.  What files, plug-ins, records and other revisions may
    have is left to the registry, which refuses it later.
    """
    for name in ("op", "kernel", "kernels", "case", "scheme", "suite", "gpu"):
        value = given.get(name)
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and not text.strip() for text in texts):
            raise ValueError(f"{name}: expected a name, got an empty text; is the variable that names it set?")
    if given.get("device") not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {given['device']!r}")
    if gpu := given.get("gpu"):
        get_device(gpu)
    if "dummy" in given and not gpu:
        from rooflab.engine.load.model_files import check_model  # of the commands that load one alone

        check_model(given["model"], given["dummy"])
    elif "gpu" in given and "model" in given:
        get_architecture(given["model"])
    for op, kernel in parse_swaps(given.get("swap") or ()).items():
        _check("swap", op, kernel)
    ops, *more = (
        [own] if isinstance(own := given.get(name) or [], str) else own for name in ("op", "kernel", "kernels")
    )
    kernels = [name for own in more for name in own]
    if "op" not in given:
        for text in kernels:  # as OP=0.9x
            _check("kernel", text.partition("=")[0])
    elif (
        "op" in arguments and not any(map(given.get, OTHER_SOURCES)) and not re.search(r"\.py|::", str((ops, kernels)))
    ):
        for op in ops:
            for kernel in kernels or [None]:
                _check("kernel" if kernel else "op", op, kernel)


def _check(option: str, op: str, kernel: str | None = None) -> None:
    """Raises `ValueError` on an unknown name.  Only one that is no file's takes the time to import the op's kernels."""
    folder = Path(__file__).parents[2] / "kernels"
    known = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    if op not in known:
        if "rooflab.kernels.registry" in sys.modules or entry_points(group="rooflab.kernels"):
            return  # files and plug-ins have ops of their own, and the registry refuses what no one has
        raise ValueError(f"{option}: expected one of {', '.join(known)}, got {op!r}")
    if kernel is not None and not (folder / op / f"{kernel}.py").is_file():
        interpret_without_gpu()
        from rooflab.kernels.registry import kernels

        if kernel not in (known := list(kernels(op))):
            raise ValueError(f"{option}: {op} has {', '.join(known)}, got {kernel!r}")


def parse_swaps(texts: Sequence[str]) -> dict[str, str]:
    """`OP=KERNEL` texts as a mapping.  Raises `ValueError` on another form, or if an op comes twice."""
    return values_by_name(texts, "swap: expected OP=KERNEL, each op once", lambda op, kernel: kernel)


def interpret_without_gpu() -> None:
    """Lets Triton interpret its kernels unless there is a CUDA device, or the user has chosen; it reads this once."""
    if "TRITON_INTERPRET" not in os.environ and not cuda_device_present():
        os.environ["TRITON_INTERPRET"] = "1"


def cuda_device_present() -> bool:
    """Whether torch can use a CUDA device here; asks the driver, because importing torch takes more than a second."""
    if "+cpu" in version("torch"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
