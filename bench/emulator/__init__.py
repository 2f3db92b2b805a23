"""Emulates GPU kernels: runs on the CPU the code that Triton and Gluon compiled for Hopper.

`emulating()` runs every launch inside its `with` block, and counts bytes and faults.  `emulate` runs one compiled
kernel or one PTX text.  README.md describes the design.  Everything else in this folder is internal.
"""

from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.emulating import Choice, Emulation, emulating, users_part
from rooflab.bench.emulator.faults import Finding
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.launches import QUICK, Launches, NotSampled, emulating_launches
from rooflab.bench.emulator.machine.counting import SECTOR
from rooflab.bench.emulator.machine.run import Checks, EmulationError
from rooflab.bench.emulator.results import Bytes, LaunchResult
from rooflab.bench.emulator.tiles.tensor_map import TensorMap

__all__ = [
    "QUICK", "SECTOR", "Bytes", "Checks", "Choice", "Emulation", "EmulationError", "Finding", "LaunchResult",
    "Launches", "NotSampled", "PtxLaunch", "TensorMap", "emulate", "emulating", "emulating_launches", "users_part",
]  # fmt: skip
