"""CUDA C++ of `tests/emulator/ptx_cuda_kernels`, compiled once, run in the emulator on CPU tensors."""

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

KERNELS = Path(__file__).parent / "ptx_cuda_kernels"
BOTH_ORDERS = (0, 3)
"""Seeds: warps together as far as they go, and in a drawn order."""


def ptx(file: str, *options: str) -> str:
    """The PTX of one of the files."""
    return compile_ptx((KERNELS / f"{file}.cu").read_text(), options=("--device-int128", *options))


def run(
    file: str,
    name: str,
    args: Sequence[Any],
    *,
    grid: Sequence[int] = (1,),
    block: int = 128,
    shared: int = 0,
    options: Sequence[str] = (),
    **more: Any,
) -> LaunchResult:
    """Emulates a kernel of a file; NumPy arrays among `args` are its memory."""
    given = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args]
    return emulate(PtxLaunch(ptx(file, *options), name, (block, 1, 1), shared), grid, given, **more)
