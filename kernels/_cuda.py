"""CUDA C++ kernels: compiled by NVRTC to a cubin, with no GPU, and launched through CuPy on torch's tensors and stream.

CuPy brings NVRTC and the launch; its arrays are not used. A cubin is kept in the cache folder under a hash of all that
goes into it. NVRTC has no host headers: `cuda.h` does not compile, and a tensor map is a 64-byte aligned struct of 128
bytes. Types from `cuda_bf16.h`, `cuda_fp8.h` and `cuda/barrier` are found in NVIDIA's wheels or a CUDA toolkit.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

STANDARD = "--std=c++17"
STATIC_SHARED_BYTES = 48 * 2**10
"""Shared memory, static and dynamic, that a launch gets without asking first (CUDA C++ Programming Guide, "Shared
Memory")."""
ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")
# From one toolkit to the next the same names stand for other files, so the first folder that has one must win.
HEADER_PACKAGES = ("cccl", "cudart", "nvcc")


class CudaCompileError(RuntimeError):
    """NVRTC refused a source; `log` is what it printed."""

    def __init__(self, log: str):
        super().__init__(f"NVRTC: {log}")
        self.log = log


def compile_cubin(source: str, *, arch: str = "sm_90a", options: tuple[str, ...] = ()) -> bytes:
    """The cubin of CUDA C++ `source` for `arch`; needs no GPU.

    `options` are NVRTC's (`-DTILE=64`, `--maxrregcount=128`).  Raises `CudaCompileError` with the compiler's log, and
    `ValueError` on an `arch` that is none, or where CuPy or NVRTC is not installed.
    """
    return cubin_file(source, arch=arch, options=options).read_bytes()


def cubin_file(source: str, *, arch: str = "sm_90a", options: tuple[str, ...] = (), folder: Path | None = None) -> Path:
    """The cubin's file in `folder` (`cubin_folder()` by default), compiled where it is not there yet.

    Its name is a hash of source, options, architecture, NVRTC's version and the folders that headers come from.  With
    a folder named in `options` it is compiled each time, because what its headers say is in no hash.
    """
    if not ARCHITECTURE.fullmatch(arch):
        raise ValueError(f"arch: expected one like sm_90a, got {arch!r}")
    folder = folder or cubin_folder()
    headers = include_folders() if "#include" in source else ()
    path = folder / f"{_key(source, arch, options, headers)}.cubin"
    log_path = path.with_suffix(".log")
    known = not any(option.startswith(("-I", "--include-path")) for option in options)
    if known and path.is_file() and log_path.is_file():
        return path
    cubin, log = _compile(source, arch, (*options, *(f"-I{header}" for header in headers)))
    _write(log_path, log.encode())
    _write(path, cubin)
    return path


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
            part.write(content)
        Path(part.name).replace(path)
    except OSError as error:
        raise ValueError(f"ROOFLAB_CACHE: expected a folder that can be written to, got {error}") from error


def cubin_folder() -> Path:
    """`$ROOFLAB_CACHE/cubins`, or `~/.cache/rooflab/cubins`."""
    return Path(os.environ.get("ROOFLAB_CACHE") or Path.home() / ".cache" / "rooflab") / "cubins"


def compiler_log(source: str, *, arch: str = "sm_90a", options: tuple[str, ...] = ()) -> str:
    """What NVRTC and ptxas say of a source that compiles: warnings, such as that wgmma was serialized."""
    return cubin_file(source, arch=arch, options=options).with_suffix(".log").read_text()


def _key(source: str, arch: str, options: Sequence[str], headers: Sequence[str]) -> str:
    # A folder's time, because another version of a package makes its folder anew.
    stamps = [(header, os.stat(header).st_mtime_ns) for header in headers]
    parts = (source, arch, tuple(options), nvrtc_version(), stamps)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compile(source: str, arch: str, options: Sequence[str]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    standard = () if any(option.startswith(("-std", "--std")) for option in options) else (STANDARD,)
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={arch}", *standard, *options))
        return _whole(nvrtc.getCUBIN(program)), _log(nvrtc, program)
    except nvrtc.NVRTCError as error:
        raise CudaCompileError(_log(nvrtc, program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)


def _log(nvrtc: Any, program: int) -> str:
    return str(nvrtc.getProgramLog(program)).replace("\0", "").strip()


def _whole(cubin: bytes) -> bytes:
    """The cubin with the last byte that CuPy 14 takes for the end of a text: drivers bear its loss, cuobjdump does not.

    The program headers stand at an ELF file's end here, and their last byte is the top one of an alignment: zero.
    """
    (start,) = struct.unpack_from("<Q", cubin, 32)
    size, count = struct.unpack_from("<HH", cubin, 54)
    return cubin.ljust(start + size * count, b"\0")


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version, (13, 0) for CUDA 13.0.  Raises `ValueError` where there is none."""
    return _version(_nvrtc())


@cache
def _version(nvrtc: ModuleType) -> tuple[int, int]:
    major, minor = nvrtc.getVersion()
    return int(major), int(minor)


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
    """Folders of CUDA's headers, in the order in which they are searched; none where none is installed.

    NVIDIA's pathfinder, which CuPy finds NVRTC with, looks in wheels, conda, the system and `CUDA_PATH`.
    """
    pathfinder: Any = import_module("cuda.pathfinder")
    known = [name for name in HEADER_PACKAGES if name in pathfinder.SUPPORTED_HEADERS_CTK]
    found = [pathfinder.find_nvidia_header_directory(name) for name in known]
    # A toolkit's own CCCL lies below its headers, where pathfinder finds it only beside a toolkit that it knows.
    below = [os.path.join(folder, "cccl") for folder in found if folder]
    present = [folder for folder in (*found, *below) if folder and os.path.isdir(folder)]
    return tuple(dict.fromkeys(present))


def architecture(device: torch.device | int | None = None) -> str:
    """The `arch` of a GPU: `sm_90a` on a Hopper, whose wgmma and TMA only the `a` target has.  Needs a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{10 * major + minor}" + ("a" if major >= 9 else "")


@cache
def load(source: str, name: str, *, options: tuple[str, ...] = ()) -> CudaKernel:
    """The kernel `name` of `source`, which must be `extern "C"`.  Compiled and loaded at its first launch on a GPU."""
    return CudaKernel(source, name, options)


class CudaKernel:
    """A kernel that takes torch tensors: `kernel(grid, block, x, out, numpy.int32(n), shared_bytes=0)`.

    A tensor becomes the address of its first element, without a copy and with any strides; None a null pointer; a
    NumPy scalar is passed with its own width, and a NumPy array of one structured element by value. Python's own
    numbers are refused, because they do not say which width the kernel takes. The launch is asynchronous, on the
    current stream of the tensors' device; launch once before capturing into a CUDA graph, since the first one loads.
    """

    def __init__(self, source: str, name: str, options: tuple[str, ...] = ()):
        self.source = source
        self.name = name
        self.options = options
        self.log = ""
        """What the compiler said of the source, once it is loaded."""
        self._raw: dict[int, Any] = {}
        self._shared_bytes: dict[int, int] = {}
        """Dynamic shared memory that a launch may have on each device by now."""

    def __call__(self, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0) -> None:
        """Launches.  Raises `ValueError` on an argument that it cannot pass, or tensors on more than one GPU."""
        device = _device(arguments)
        values = tuple(_value(index, argument) for index, argument in enumerate(arguments))
        with torch.cuda.device(device):
            raw = self.raw(device)
            if shared_bytes > self._shared_bytes.get(device, STATIC_SHARED_BYTES):
                raw.max_dynamic_shared_size_bytes = shared_bytes
                self._shared_bytes[device] = shared_bytes
            stream = _stream(torch.cuda.current_stream(device).cuda_stream)
            raw(tuple(grid), tuple(block), values, shared_mem=shared_bytes, stream=stream)

    def raw(self, device: int) -> Any:
        """CuPy's kernel for GPU number `device`, whose `attributes` hold registers and spilled bytes."""
        if device not in self._raw:
            with torch.cuda.device(device):
                file = cubin_file(self.source, arch=architecture(device), options=self.options)
                self.log = file.with_suffix(".log").read_text()
                raw = _cupy().RawModule(path=str(file)).get_function(self.name)
                # Beside static shared memory, padded to what the dynamic part is aligned to, less comes unasked.
                self._shared_bytes[device] = 0 if raw.shared_size_bytes else STATIC_SHARED_BYTES
                self._raw[device] = raw
        return self._raw[device]


@dataclass(frozen=True)
class _TorchStream:
    """A stream by its address, as CuPy 14 takes one from outside."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@cache
def _stream(address: int) -> Any:
    return _cupy().cuda.Stream.from_external(_TorchStream(address))


def _device(arguments: Sequence[Any]) -> int:
    devices = {argument.device for argument in arguments if isinstance(argument, torch.Tensor)}
    if any(device.type != "cuda" for device in devices) or len(devices) > 1:
        raise ValueError(f"arguments: expected tensors on one GPU, got {', '.join(sorted(map(str, devices)))}")
    return int(devices.pop().index) if devices else torch.cuda.current_device()


def _value(index: int, argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return np.uint64(argument.data_ptr())
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, np.generic) or (isinstance(argument, np.ndarray) and argument.size == 1):
        return argument
    raise ValueError(
        f"arguments: expected a tensor, None or a NumPy scalar such as numpy.int32(3) in place {index}, "
        f"got {type(argument).__name__} {argument!r}"
    )
