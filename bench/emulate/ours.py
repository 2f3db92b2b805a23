"""Runs Rooflab's own launchers in the emulator: they take CPU tensors, and NVRTC compiles their CUDA C++ to PTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rooflab.bench import emulator
from rooflab.bench.compile.pretended import pretended_gpu
from rooflab.bench.emulator import Emulation, Launches, PtxLaunch, TensorMap, emulating_launches
from rooflab.kernels import _cuda, _device
from rooflab.kernels._tensor_map import ELEMENTS, ROW_BYTES, CudaMap
from rooflab.kernels.registry import Kernel

ARCHITECTURE = "compute_90a"
"""The target of NVRTC: Hopper with wgmma and TMA, as a virtual architecture, so that NVRTC stops at PTX."""
Handle = Callable[[PtxLaunch, tuple[int, ...], list[Any]], None]
"""A function with the arguments of `launch.emulate`: a kernel with block and shared memory, a grid, the arguments."""


@lru_cache(maxsize=64)
def compile_ptx(source: str, *, options: tuple[str, ...] = ()) -> str:
    """Compiles the CUDA C++ text `source` to PTX; needs no GPU.

    `options` are options of NVRTC (`-DTILE=64`).  The PTX says which line of kernel.cu each instruction comes from.
    Headers are found as `kernels/_cuda.py` finds them.  Raises `CudaCompileError` with the compiler's log, and
    `ValueError` if CuPy or NVRTC is not installed.
    """
    headers = _cuda.include_folders() if "#include" in source else ()
    standard = () if any(option.startswith(("-std", "--std")) for option in options) else (_cuda.STANDARD,)
    flags = (f"--gpu-architecture={ARCHITECTURE}", *standard, "-lineinfo", *options, *(f"-I{path}" for path in headers))
    nvrtc: Any = _cuda._nvrtc()
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, flags)
        ptx = nvrtc.getPTX(program)
        return str(ptx.decode() if isinstance(ptx, bytes) else ptx).replace("\0", "")
    except nvrtc.NVRTCError as error:
        raise _cuda.CudaCompileError(_cuda._log(nvrtc, program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)


@contextmanager
def emulation() -> Iterator[None]:
    """A context in which kernels with compiled code can run here on CPU tensors; the caller redirects the launches."""
    before, _device.emulated = _device.emulated, True
    try:
        yield
    finally:
        _device.emulated = before


@contextmanager
def emulating(**options: Any) -> Iterator[Emulation]:
    """Does the same as `emulator.emulating`, with its options, also for Rooflab's own launchers."""
    with emulator.emulating(**options) as run, emulation(), emulating_cuda(run.run):
        yield run


@contextmanager
def every_launch(launches: Launches) -> Iterator[None]:
    """Gives each launch of Triton, of Gluon and of Rooflab's CUDA C++ to `launches`.

    Raises `RuntimeError` in a process that interprets Triton's kernels.
    """
    with emulating_launches(launches), emulation(), emulating_cuda(launches.run):
        yield


def pretended_for(kernel: Kernel) -> AbstractContextManager[object]:
    """A context that pretends a GPU for a user's kernel, which may ask for it; Rooflab's own launchers do not ask."""
    return nullcontext() if kernel.file is None else pretended_gpu()


@contextmanager
def emulating_cuda(handle: Handle) -> Iterator[None]:
    """Gives each launch of a `kernels._cuda.CudaKernel` to `handle` instead of a GPU.

    The class itself is changed, so it does not matter how a module imports `load`.  `handle` gets the arguments of the
    launch, with CPU tensors.  Arguments that a launch would refuse raise `ValueError` here as well.
    """
    call = _cuda.CudaKernel.__call__

    def instead(
        self: _cuda.CudaKernel, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0
    ) -> None:
        values = [_argument(index, argument) for index, argument in enumerate(arguments)]
        launch = PtxLaunch(compile_ptx(self.source, options=self.options), self.name, _triple(block), int(shared_bytes))
        handle(launch, tuple(int(size) for size in grid), values)

    _cuda.CudaKernel.__call__ = instead  # type: ignore[method-assign]
    try:
        yield
    finally:
        _cuda.CudaKernel.__call__ = call  # type: ignore[method-assign]


def _triple(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*(int(size) for size in sizes), 1, 1)[:3]
    return x, y, z


def _argument(index: int, value: Any) -> Any:
    """Returns a tensor or a tensor map as it is, and any other argument as the bytes that a launch copies."""
    checked = value if isinstance(value, torch.Tensor) else _cuda._value(index, value)
    if isinstance(checked, CudaMap):
        return _encoded(checked)
    return checked if isinstance(checked, torch.Tensor) else np.asarray(checked).tobytes()


def _encoded(made: CudaMap) -> TensorMap:
    """The tensor map that the CUDA driver would encode."""
    return TensorMap(
        made.base.data_ptr(),
        ELEMENTS[made.base.dtype][0],
        (made.columns, made.rows),
        (made.stride * made.base.element_size(),),
        made.box,
        swizzle=ROW_BYTES,
        base=made.base,
    )
