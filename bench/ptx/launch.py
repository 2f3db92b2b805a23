"""`rooflab.bench.ptx.launch` of release 0.1: use `rooflab.bench.emulator`."""

from rooflab.bench.emulator import PtxLaunch as Launch
from rooflab.bench.emulator import emulate

__all__ = ["Launch", "emulate"]
