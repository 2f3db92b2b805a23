"""Replaces kernel launches of Triton, Gluon and CUDA C++ by compilations, without a GPU.

A fake driver replaces the GPU, and the kernel's own launcher is called with meta tensors.  A meta tensor's address, 0,
is aligned like a device allocation, so Triton specialises the kernel as on a GPU.
"""

from __future__ import annotations

import hashlib
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

DEFAULT_STAGES = 3
"""Triton's `num_stages` if neither a launch nor a `triton.Config` sets it."""


@dataclass(frozen=True)
class Launch:
    """Describes one kernel launch, and holds the compiled kernel."""

    name: str
    backend: str
    """`triton`, `gluon` or `cuda`."""
    target: str
    """The architecture given to the assembler, such as `sm_90a`.  An older disassembler prints `sm_90`."""
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    cubin: bytes
    ptx: str
    shared_bytes: int
    """Shared memory per CTA in bytes.  For CUDA C++ only the dynamic part: the code declares the static part."""
    threads: int | None
    """Threads per CTA; None if only the compiled code has this number."""
    ctas: int
    """CTAs of the whole grid; each CTA of a cluster counts."""
    ir: str = ""
    """Triton's or Gluon's IR of the kernel.  The IR still shows the requested options."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The options that the launcher set, such as `num_warps`."""
    source_hash: str = ""
    tried: int = 0
    """The number of configs that an autotuner tries before this one."""
    compiled: Any = None
    """Triton's object of the compiled kernel; None for CUDA C++."""
    log: Callable[[], str] = str
    """Returns the assembler's log.  Called only if the log is needed, because the call may compile once more."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns the key of the launch.  Two launches with the same key run the same kernel on the same grid."""
        return self.name, self.source_hash, self.grid, self.threads, self.shared_bytes


class FakeDriver:
    """A fake Triton driver with one GPU.  Triton compiles kernels for this GPU, but cannot run them."""

    def __init__(self, sm: int, properties: Mapping[str, int], device: str = "meta"):
        self.target = GPUTarget("cuda", sm, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(properties))
        self.get_current_target = lambda: self.target
        # Each target has its own device number, because Triton caches compiled kernels by device.
        self.get_current_device = lambda: sm
        self.get_current_stream = lambda device: 0
        self.get_active_torch_device = lambda: torch.device(device)
        self.get_device_interface = lambda: torch.cuda
        self.get_benchmarker = lambda: triton.testing.do_bench


@contextmanager
def driven_by(driver: FakeDriver) -> Iterator[None]:
    """Makes `driver` Triton's active driver inside a `with` block."""
    triton_driver = triton.runtime.driver
    previous_driver = triton_driver._active  # `active` would look for a GPU
    triton_driver.set_active(driver)
    try:
        yield
    finally:
        triton_driver.set_active(previous_driver)


def check_internals() -> None:
    """Raises `RuntimeError` if this version of Triton lacks an internal function that this file replaces."""
    run_code = getattr(JITFunction.run, "__code__", None)
    arg_names = run_code.co_varnames[: run_code.co_argcount + run_code.co_kwonlyargcount] if run_code else ()
    has_tuner = hasattr(Autotuner, "run") and hasattr(Autotuner, "prune_configs")
    if not hasattr(triton.runtime.driver, "set_active") or not {"grid", "warmup"} <= set(arg_names) or not has_tuner:
        raise RuntimeError(
            "triton: expected driver.set_active, Autotuner.prune_configs and JITFunction.run(..., grid, warmup), "
            f"as in 3.6 and 3.7, and {triton.__version__} has not got them"
        )


@contextmanager
def recording_triton(sm: int, properties: Mapping[str, int], launches: list[Launch]) -> Iterator[None]:
    """Makes Triton compile for `sm` without launching; appends each launch of a non-empty grid to `launches`."""
    check_internals()
    original_run = JITFunction.run
    defaults: set[str] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names and name not in defaults}
        with redirect_stdout(StringIO()) as log, triton.knobs.nvidia.scope():
            triton.knobs.nvidia.dump_ptxas_log = True
            kernel = original_run(self, *args, grid=grid, warmup=True, **kwargs)
        if callable(grid):
            grid = grid({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        if 0 not in grid:  # Triton's launcher skips an empty grid
            launches.append(_launch(self, kernel, tuple(int(grid_size) for grid_size in grid), options, log.getvalue()))
        return kernel

    def every_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compiles each config that the autotuner would try, without timing any config."""
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config_index, config in enumerate(self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs):
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
            # `triton.Config` always has a `num_stages`; its default value was not requested.
            defaults.update({"num_stages"} if config.num_stages == DEFAULT_STAGES else ())
            first_index = len(launches)
            kernel = self.fn.run(*args, **kwargs, **config.all_kwargs())
            launches[first_index:] = [replace(launch, tried=config_index) for launch in launches[first_index:]]
            defaults.clear()
        self.nargs = None
        return kernel

    triton.runtime.driver.set_active(FakeDriver(sm, properties))
    with patch.object(JITFunction, "run", compile_only), patch.object(Autotuner, "run", every_config):
        yield


def _launch(function: Any, kernel: Any, grid: tuple[int, ...], asked: Mapping[str, Any], log: str) -> Launch:
    is_gluon = callable(getattr(function, "is_gluon", None)) and bool(function.is_gluon())
    scalar_options = {name: value for name, value in asked.items() if isinstance(value, bool | int | float | str)}
    return Launch(
        name=kernel.metadata.name,
        backend="gluon" if is_gluon else "triton",
        target=_target(kernel),
        grid=grid,
        num_warps=_num_warps(kernel),
        num_stages=int(getattr(kernel.metadata, "num_stages", 0) or 0),
        cubin=kernel.asm["cubin"],
        ptx=kernel.asm["ptx"],
        shared_bytes=int(kernel.metadata.shared),
        threads=None,
        ctas=int(kernel.metadata.num_ctas) * math.prod(grid),
        # The IR before any pass: the pass for sm_80 already replaces tensor descriptors with pointers.
        ir=str(kernel.asm["source"]),
        asked=scalar_options,
        source_hash=kernel.hash,
        compiled=kernel,
        log=lambda: log or ptxas_log(kernel),  # a kernel from Triton's cache has no log
    )


def _num_warps(kernel: Any) -> int:
    """Returns the number of warps that a Triton kernel requests, without the warps that warp specialisation adds."""
    regex_match = re.search(r'"ttg\.num-warps" = (\d+)', str(kernel.asm["ttgir"]))
    return int(regex_match[1]) if regex_match else int(kernel.metadata.num_warps)


def _target(kernel: Any) -> str:
    return str(re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)[0])


def ptxas_log(kernel: Any) -> str:
    """Assembles the kernel's PTX once more, and returns the log of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        ptxas_path = get_ptxas(kernel.metadata.target.arch).path  # another for Hopper from Triton 3.9.0 on
        command = [ptxas_path, "-v", f"--gpu-name={_target(kernel)}", str(source), "-o", f"{folder}/kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, timeout=300).stderr


_STAGES_OPTION = re.compile(r"-DSTAGES=(\d+)")
"""The option that gives Rooflab's CUDA C++ kernels the number of slots of the ring in shared memory."""
_IGNORED_OPTION = re.compile(r"^-{1,2}(I|include-path|std)")


@contextmanager
def recording_cuda(arch: str, launches: list[Launch]) -> Iterator[None]:
    """Makes `CudaKernel` compile for `arch` instead of launch, in a `with` block.  Appends each launch to `launches`.

    Replaces `CudaKernel.__call__`, not the function `load`, because other modules have already imported `load`."""
    from rooflab.kernels import _cuda

    def compile_only(
        self: Any, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0
    ) -> None:
        for argument_index, kernel_argument in enumerate(arguments):
            _cuda._value(argument_index, kernel_argument)  # raises where a launch would refuse it
        launches.append(_cuda_launch(_cuda, self, arch, tuple(grid), tuple(block), shared_bytes))

    with patch.object(_cuda.CudaKernel, "__call__", compile_only):
        yield


def _cuda_launch(
    cuda: Any, kernel: Any, arch: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int
) -> Launch:
    threads = math.prod(map(int, block))
    source_text = repr((kernel.source, kernel.options))
    return Launch(
        name=kernel.name,
        backend="cuda",
        target=arch,
        grid=tuple(int(grid_size) for grid_size in grid),
        num_warps=-(-threads // 32),
        num_stages=next((int(match[1]) for option in kernel.options if (match := _STAGES_OPTION.fullmatch(option))), 0),
        cubin=cuda.compile_cubin(kernel.source, arch=arch, options=kernel.options),
        ptx="",
        shared_bytes=int(shared_bytes),
        threads=threads,
        ctas=math.prod(map(int, grid)),
        asked={"options": " ".join(option for option in kernel.options if not _IGNORED_OPTION.match(option))},
        source_hash=hashlib.sha256(source_text.encode()).hexdigest(),
        log=lambda: cuda.compiler_log(kernel.source, arch=arch, options=kernel.options),
    )
