"""Compiles CUDA C++ kernels with NVRTC, without a GPU. Launches them with CuPy on torch's tensors and stream.

A kernel's source is one file, which includes shared headers from `kernels/lib/`. The cache folder keeps each compiled
kernel (cubin). NVRTC has no host headers and cannot compile `cuda.h`. So a kernel declares a tensor map as a struct of
128 bytes, aligned to 64 bytes. `cuda_bf16.h`, `cuda_fp8.h` and `cuda/barrier` come from NVIDIA's wheels or a CUDA
toolkit.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder, check_writable
from rooflab.kernels._pdl import launch_dependent
from rooflab.kernels._tensor_map import CudaMap

LIB_FOLDER = Path(__file__).parent / "lib"
"""The folder of headers and sources that several ops share."""
ELEMENT_CODES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}
"""The number that stands for each dtype in the CUDA sources, as the macro ELEMENT."""
CXX_STANDARD = "--std=c++17"
STATIC_SHARED_BYTES = 48 * 2**10
"""Bytes of static and dynamic shared memory that a launch may use without a request (CUDA C++ Programming Guide,
"Shared Memory")."""
ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")
# The same header differs between toolkits, so the first folder in this order that has a header must win.
HEADER_PACKAGES = ("cccl", "cudart", "nvcc")


class CudaCompileError(RuntimeError):
    """The error for a source that NVRTC rejects.  `log` is NVRTC's message."""

    def __init__(self, log: str):
        super().__init__(f"NVRTC: {log}")
        self.log = log


def compile_cubin(source: str, *, arch: str = "sm_90a", options: tuple[str, ...] = ()) -> bytes:
    """Compiles CUDA C++ `source` for `arch` to a cubin, without a GPU.

    NVRTC gets `options`, such as `-DTILE=64`.  Raises `CudaCompileError` if NVRTC rejects the source, with its log.
    Raises `ValueError` if `arch` is invalid, or if CuPy or NVRTC is not installed."""
    return cubin_file(source, arch=arch, options=options).read_bytes()


def cubin_file(source: str, *, arch: str = "sm_90a", options: tuple[str, ...] = ()) -> Path:
    """Returns the path of the compiled kernel (cubin) in the cache folder. Compiles the source if the file is missing.

    The file name is a hash of the source, options, architecture, NVRTC's version and the headers. The hash does not
    cover other include folders, so `options` must not add one."""
    if not ARCHITECTURE.fullmatch(arch):
        raise ValueError(f"arch: expected one like sm_90a, got {arch!r}")
    headers = include_folders() if "#include" in source else ()
    cubin_path = cache_folder() / "cubins" / f"{_key(source, arch, options, headers)}.cubin"
    log_path = cubin_path.with_suffix(".log")
    if cubin_path.is_file() and log_path.is_file():
        return cubin_path
    cubin, log = _compile(source, arch, (*options, *(f"-I{header}" for header in headers)))
    check_writable("ROOFLAB_CACHE", cubin_path.parent)
    write_whole(log_path, log)
    write_whole(cubin_path, cubin)
    return cubin_path


def compiler_log(source: str, *, arch: str = "sm_90a", options: tuple[str, ...] = ()) -> str:
    """Returns the messages of NVRTC and ptxas for `source`, such as a warning that wgmma is serialized."""
    return cubin_file(source, arch=arch, options=options).with_suffix(".log").read_text()


def _key(source: str, arch: str, options: Sequence[str], headers: Sequence[str]) -> str:
    # CUDA's folders by their time of change: a new version of a package creates its folder again.
    mtime_ns = [(header, os.stat(header).st_mtime_ns) for header in headers if header != str(LIB_FOLDER)]
    inputs = (source, arch, tuple(options), nvrtc_version(), mtime_ns, _own_headers() if '#include "' in source else "")
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]


@cache
def _own_headers() -> str:
    return "".join(header_path.read_text() for header_path in sorted(LIB_FOLDER.glob("*.h")))


def _compile(source: str, arch: str, options: Sequence[str]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    nvrtc_program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(nvrtc_program, (f"--gpu-architecture={arch}", CXX_STANDARD, *options))
        return _whole(nvrtc.getCUBIN(nvrtc_program)), _log(nvrtc, nvrtc_program)
    except nvrtc.NVRTCError as error:
        raise CudaCompileError(_log(nvrtc, nvrtc_program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(nvrtc_program)


def _log(nvrtc: Any, program: int) -> str:
    return str(nvrtc.getProgramLog(program)).replace("\0", "").strip()


def _whole(cubin: bytes) -> bytes:
    """Appends the zero byte that CuPy 14 drops at the end of a cubin.  cuobjdump needs this byte. The end of the
    program headers gives the full length, because they come last in a cubin."""
    (headers_start,) = struct.unpack_from("<Q", cubin, 32)
    header_size, header_count = struct.unpack_from("<HH", cubin, 54)
    return cubin.ljust(headers_start + header_size * header_count, b"\0")


def nvrtc_version() -> tuple[int, int]:
    """Returns NVRTC's version, such as (13, 0) for CUDA 13.0.  Raises `ValueError` if NVRTC is not installed."""
    major_version, minor_version = _nvrtc().getVersion()
    return int(major_version), int(minor_version)


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ValueError(
            f"cupy: expected the package, which compiles and launches CUDA C++ (pip install 'rooflab[cuda]'), "
            f"got {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        ) from error
    return cupy


@cache
def _nvrtc() -> Any:
    nvrtc = _cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        raise ValueError(
            f"nvrtc: expected NVIDIA's run-time compiler (the package nvidia-cuda-nvrtc, or a toolkit in CUDA_PATH), "
            f"got {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        ) from error
    return nvrtc


@cache
def include_folders() -> tuple[str, ...]:
    """Returns `kernels/lib`, then the folders of CUDA's headers (if installed) in search order.

    NVIDIA's pathfinder searches wheels, conda, the system and `CUDA_PATH`; CuPy also uses it to find NVRTC.
    """
    pathfinder: Any = import_module("cuda.pathfinder")
    package_names = [name for name in HEADER_PACKAGES if name in pathfinder.SUPPORTED_HEADERS_CTK]
    cuda_folders = [pathfinder.find_nvidia_header_directory(name) for name in package_names]
    # In some toolkits CCCL is a subfolder of the other headers, which pathfinder does not search.
    cccl_folders = [os.path.join(folder, "cccl") for folder in cuda_folders if folder]
    existing_folders = [folder for folder in (*cuda_folders, *cccl_folders) if folder and os.path.isdir(folder)]
    return tuple(dict.fromkeys((str(LIB_FOLDER), *existing_folders)))


def architecture(device: torch.device | int | None = None) -> str:
    """Returns the architecture of a GPU: `sm_90a` on Hopper, because wgmma and TMA need the `a`.  Requires a GPU."""
    gpu_major, gpu_minor = torch.cuda.get_device_capability(device)
    return f"sm_{10 * gpu_major + gpu_minor}" + ("a" if gpu_major >= 9 else "")


def macros(**values: str | int | bool) -> tuple[str, ...]:
    """Returns the NVRTC options that define `values` as macros, such as `-DTILE=64`.  A bool becomes 1 or 0."""
    return tuple(f"-D{name}={int(value) if isinstance(value, bool) else value}" for name, value in values.items())


@cache
def load(source: str, name: str, *, options: tuple[str, ...] = (), dependent: bool = False) -> CudaKernel:
    """Returns the kernel `name` of `source` (declared `extern "C"`).  The first launch on a GPU compiles and loads it.

    If `dependent` is set, the kernel may start before the previous kernel ends (PDL).  Its source must include `pdl.h`.
    """
    return CudaKernel(source, name, options, dependent)


class CudaKernel:
    """A kernel that takes torch tensors: `kernel(grid, block, x, out, numpy.int32(n), shared_bytes=0)`.

    A tensor is passed as the address of its first element, and None as a null pointer. A NumPy scalar keeps its dtype.
    A `CudaMap` (tensor map) or a NumPy array of one structured element is passed by value. A Python number raises
    `ValueError`, because its width is not known. The launch is asynchronous, on torch's current stream. The first
    launch loads the kernel, so launch once before you capture a CUDA graph.
    """

    def __init__(self, source: str, name: str, options: tuple[str, ...] = (), dependent: bool = False):
        if dependent and '#include "pdl.h"' not in source:
            raise ValueError(f"dependent: expected a source that includes pdl.h, by which it waits; {name} does not")
        self.source = source
        self.name = name
        self.options = (*options, "-DPDL") if dependent else options
        self.dependent = dependent
        self._raw: dict[int, Any] = {}
        self._shared_bytes: dict[int, int] = {}
        """The dynamic shared memory per launch that was requested so far, in bytes, by device."""

    def __call__(self, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0) -> None:
        """Launches the kernel.  Raises `ValueError` if an argument's type is unknown, or if the tensors are not on one
        GPU."""
        device = _device(arguments)
        checked_args = [_value(arg_index, argument) for arg_index, argument in enumerate(arguments)]
        tensor_maps = {id(arg): arg for arg in checked_args if isinstance(arg, CudaMap)}
        encoded_maps = {argument_id: arg.encoded() for argument_id, arg in tensor_maps.items()}  # each map once
        launch_values = tuple(encoded_maps.get(id(arg), arg) for arg in checked_args)
        with torch.cuda.device(device):
            cupy_kernel = self.raw(device)
            if shared_bytes > self._shared_bytes.get(device, STATIC_SHARED_BYTES):
                cupy_kernel.max_dynamic_shared_size_bytes = shared_bytes
                self._shared_bytes[device] = shared_bytes
            stream = torch.cuda.current_stream(device).cuda_stream
            if self.dependent:
                launch_dependent(cupy_kernel.kernel.ptr, grid, block, launch_values, shared_bytes, stream)
            else:
                cupy_kernel(tuple(grid), tuple(block), launch_values, shared_mem=shared_bytes, stream=_stream(stream))

    def raw(self, device: int) -> Any:
        """Returns CuPy's kernel for GPU number `device`.  Its `attributes` have the registers and the spilled bytes."""
        if device not in self._raw:
            with torch.cuda.device(device):
                cubin_path = cubin_file(self.source, arch=architecture(device), options=self.options)
                cupy_kernel = _cupy().RawModule(path=str(cubin_path)).get_function(self.name)
                # Static shared memory and its padding take part of the 48 KB that need no request.
                self._shared_bytes[device] = 0 if cupy_kernel.shared_size_bytes else STATIC_SHARED_BYTES
                self._raw[device] = cupy_kernel
        return self._raw[device]


@dataclass(frozen=True)
class _TorchStream:
    """A CUDA stream, given by its address, in a form that CuPy 14 accepts."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@cache
def _stream(address: int) -> Any:
    return _cupy().cuda.Stream.from_external(_TorchStream(address))


def _device(arguments: Sequence[Any]) -> int:
    tensors = (argument.base if isinstance(argument, CudaMap) else argument for argument in arguments)
    tensor_devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    if any(device.type != "cuda" for device in tensor_devices) or len(tensor_devices) > 1:
        raise ValueError(f"arguments: expected tensors on one GPU, got {', '.join(sorted(map(str, tensor_devices)))}")
    return int(tensor_devices.pop().index) if tensor_devices else torch.cuda.current_device()


def _value(index: int, argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return np.uint64(argument.data_ptr())
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, CudaMap | np.generic) or (isinstance(argument, np.ndarray) and argument.size == 1):
        return argument
    raise ValueError(
        f"arguments: expected a tensor, None or a NumPy scalar such as numpy.int32(3) in place {index}, "
        f"got {type(argument).__name__} {argument!r}"
    )
