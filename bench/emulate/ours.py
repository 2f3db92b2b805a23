"""Runs Rooflab's own kernels in the emulator.  The kernels get CPU tensors, and NVRTC compiles CUDA C++ to PTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from rooflab.bench import emulator
from rooflab.bench.compile.pretended import pretended_gpu
from rooflab.bench.emulator import Emulation, Launches, PtxLaunch, TensorMap, emulating_launches
from rooflab.kernels import _cuda, _device
from rooflab.kernels._tensor_map import ELEMENT_TYPES, ROW_BYTES, CudaMap
from rooflab.kernels.registry import Kernel

ARCHITECTURE = "compute_90a"
"""The target of NVRTC: Hopper with wgmma and TMA, as a virtual architecture, so that NVRTC stops at PTX."""
LaunchHook = Callable[[PtxLaunch, tuple[int, ...], list[Any]], None]
"""A function with the arguments of `launch.emulate`: a kernel with block and shared memory, a grid, the arguments."""


@lru_cache(maxsize=64)
def compile_ptx(source: str, *, options: tuple[str, ...] = ()) -> str:
    """Compiles the CUDA C++ text `source` to PTX, without a GPU.  The PTX names the source line of each instruction.

    `options` are options of NVRTC, such as `-DTILE=64`.  Raises `CudaCompileError` with the compiler's log, and
    `ValueError` if CuPy or NVRTC is not installed.
    """
    headers = _cuda.include_folders() if "#include" in source else ()
    std_flag = () if any(option.startswith(("-std", "--std")) for option in options) else (_cuda.CXX_STANDARD,)
    flags = (f"--gpu-architecture={ARCHITECTURE}", *std_flag, "-lineinfo", *options, *(f"-I{path}" for path in headers))
    nvrtc: Any = _cuda._nvrtc()
    nvrtc_program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(nvrtc_program, flags)
        ptx = nvrtc.getPTX(nvrtc_program)
        return str(ptx.decode() if isinstance(ptx, bytes) else ptx).replace("\0", "")
    except nvrtc.NVRTCError as error:
        raise _cuda.CudaCompileError(_cuda._log(nvrtc, nvrtc_program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(nvrtc_program)


def emulation() -> AbstractContextManager[object]:
    """Lets compiled kernels accept CPU tensors inside `with`.  The caller must pass their launches to the emulator."""
    return patch.object(_device, "is_emulated", True)


@contextmanager
def emulating(**options: Any) -> Iterator[Emulation]:
    """Works like `emulator.emulating`, with the same options.  Also emulates the launches of Rooflab's own kernels."""
    with emulator.emulating(**options) as emulation_run, emulation(), emulating_cuda(emulation_run.run):
        yield emulation_run


@contextmanager
def every_launch(launches: Launches) -> Iterator[None]:
    """Passes each launch of Triton, Gluon and Rooflab's CUDA C++ to `launches`, which emulates it.

    Raises `RuntimeError` in a process that interprets Triton's kernels."""
    with emulating_launches(launches), emulation(), emulating_cuda(launches.run):
        yield


def pretended_for(kernel: Kernel) -> AbstractContextManager[object]:
    """Provides a fake GPU for a user's kernel, which may query the GPU.  Rooflab's own kernels do not query it."""
    return nullcontext() if kernel.file is None else pretended_gpu()


@contextmanager
def emulating_cuda(handle: LaunchHook) -> Iterator[None]:
    """Passes each launch of a `kernels._cuda.CudaKernel` to `handle` instead of a GPU.

    Patches the class itself, so that every import of the class is covered.  `handle` gets the arguments of the launch,
    with CPU tensors.  Raises `ValueError` on arguments that a real launch would refuse."""

    def instead(
        self: _cuda.CudaKernel, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0
    ) -> None:
        launch_values = [_argument(arg_index, launch_argument) for arg_index, launch_argument in enumerate(arguments)]
        ptx = compile_ptx(self.source, options=self.options)
        x, y, z = (*map(int, block), 1, 1)[:3]
        launch = PtxLaunch(ptx, self.name, (x, y, z), int(shared_bytes), dependent=self.dependent)
        handle(launch, tuple(int(axis_size) for axis_size in grid), launch_values)

    with patch.object(_cuda.CudaKernel, "__call__", instead):
        yield


def _argument(index: int, value: Any) -> Any:
    """Converts an argument of a kernel launch for the emulator. A tensor stays a tensor, a tensor map is converted, and
    any other value becomes bytes."""
    argument = value if isinstance(value, torch.Tensor) else _cuda._value(index, value)
    if isinstance(argument, CudaMap):
        return _encoded(argument)
    return argument if isinstance(argument, torch.Tensor) else np.asarray(argument).tobytes()


def _encoded(made: CudaMap) -> TensorMap:
    """Converts a `CudaMap` to the tensor map that the CUDA driver would encode."""
    return TensorMap(
        made.base.data_ptr(),
        ELEMENT_TYPES[made.base.dtype][0],
        (made.columns, made.rows),
        (made.stride * made.base.element_size(),),
        made.box,
        swizzle=ROW_BYTES,
        base=made.base,
    )
