"""NVIDIA's management library, where the package `nvidia-ml-py` and a driver are there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

POWER_INSTANT, SUCCESS = 186, 0
"""`NVML_FI_DEV_POWER_INSTANT` and `NVML_SUCCESS` (nvml.h); older packages do not name the first."""


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


def power(nvml: Any, handle: Any) -> tuple[int | None, str | None]:
    """Milliwatts drawn, and the question that NVML answered.

    `nvmlDeviceGetPowerUsage` is an average of a second on most cards, far longer than a kernel, so that it is asked
    only where the power of this moment is not to be had.
    """
    fields = ask(nvml, "nvmlDeviceGetFieldValues", handle, [POWER_INSTANT])
    if fields is not None and fields[0].nvmlReturn == SUCCESS:
        return int(fields[0].value.uiVal), "NVML_FI_DEV_POWER_INSTANT"
    power_mw = ask(nvml, "nvmlDeviceGetPowerUsage", handle)
    return power_mw, None if power_mw is None else "nvmlDeviceGetPowerUsage"
