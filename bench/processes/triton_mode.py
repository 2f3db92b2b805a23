"""Triton's mode belongs to the whole process: it reads the environment at its first import."""

from __future__ import annotations

import ctypes
import os
from importlib.metadata import version


def interpret_without_gpu() -> None:
    """Lets Triton interpret its kernels unless there is a CUDA device, or the user has chosen a mode.

    Called before torch is imported, and so before Triton is.
    """
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
