"""`rooflab` and `python -m rooflab.bench`: sets Triton's mode, then runs the command line."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.metadata import version

from rooflab.bench.processes.witnessed import PIPE, with_verdict, witness


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


def main() -> None:
    """The command line.  Without a CUDA device it re-executes itself once in Triton's interpreter mode.

    Triton reads the mode from the environment at its first import, so the variable must be set before.  A command that
    judges kernels in its own process has a witness.
    """
    command = [sys.executable, "-m", "rooflab.bench", *sys.argv[1:]]
    chosen = "TRITON_INTERPRET" in os.environ
    if not chosen and not cuda_device_present():
        os.environ["TRITON_INTERPRET"] = "1"
    if PIPE not in os.environ and sys.argv[1:2] in (["bench"], ["emulate"]):
        sys.exit(witness(command, os.environ))
    if not chosen and "TRITON_INTERPRET" in os.environ:
        os.execv(sys.executable, command)
    from rooflab.bench.cli.app import run

    with_verdict(run)


if __name__ == "__main__":
    main()
