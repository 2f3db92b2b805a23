"""NVIDIA's management library, where the package `nvidia-ml-py` and a driver are there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def nvml_of(uuid: str) -> Iterator[tuple[Any, Any] | None]:
    """NVML and its handle of the GPU, or None where the package or the driver is not there.

    The handle is None where this machine has no such GPU.
    """
    if importlib.util.find_spec("pynvml") is None:
        yield None
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml, ask(pynvml, "nvmlDeviceGetHandleByUUID", uuid)
    finally:
        pynvml.nvmlShutdown()


def ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """What NVML answers, or None where this card or driver does not support the question."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None
