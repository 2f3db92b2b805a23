"""The CUDA C++ of `ptx_cuda_kernels.cu`, compiled once, run in the emulator on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooflab.bench.emulate.ours import compile_ptx
from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.results import LaunchResult

SOURCE = (Path(__file__).parent / "ptx_cuda_kernels.cu").read_text()
BOTH_ORDERS = (0, 3)
"""Seeds: warps together as far as they go, and in a drawn order."""


def ptx() -> str:
    """The PTX of the file."""
    return compile_ptx(SOURCE)


def run(name: str, args: Sequence[Any], *, grid: Sequence[int] = (1,), block: int = 128, **more: Any) -> LaunchResult:
    """Emulates a kernel of the file; NumPy arrays among `args` are its memory."""
    given = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args]
    return emulate(PtxLaunch(ptx(), name, (block, 1, 1)), grid, given, **more)
