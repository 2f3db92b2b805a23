"""What a call makes the device do: which kernels, of which code, on which grids, in which order.

Its hash says whether two sides of an A/B are the same device code, whatever the Python around it: it holds neither
addresses nor times, and of a Triton kernel's binary only the instructions and constants, because line numbers and file
names, which two checkouts do not share, are in the binary too.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rooflab.bench.timing.cuda_calls import CudaCalls
from rooflab.bench.timing.trace import DeviceKernel, record_calls
from rooflab.kernels.registry import interpreting

CODE_SECTIONS = (".text.", ".nv.constant", ".nv.global.init", ".rodata")
"""Beginnings of the names of a cubin's sections that hold instructions and constants."""


@dataclass(frozen=True)
class Activity:
    """The device's kernels of one call, in order."""

    kernels: tuple[str, ...]
    """Their names."""
    hash: str | None
    """SHA-256 over names, code, grids, blocks and shared memory in order; None where nothing was recorded."""


def device_activity(function: Callable[[], object], device: torch.device, cuda: CudaCalls | None = None) -> Activity:
    """What one call of `function` makes a CUDA device do; a first call, which may compile and tune, goes before.

    Raises `trace.NotRecorded` where CUPTI records nothing, and whatever `function` raises.
    """
    cuda = cuda or CudaCalls(device)
    with cuda.use():
        function()
        cuda.synchronize()
        with launched_code() as launched:
            (call,) = record_calls([function], cuda)
    return Activity(call.names, activity_hash(call.kernels, launched))


def activity_hash(kernels: Sequence[DeviceKernel], launched: Sequence[tuple[str, str]] = ()) -> str | None:
    """The hash over `kernels`; `launched` holds name and code hash of launches whose code is known, in order.

    A kernel's code counts where every launch of its name was seen; the other kernels are known by their names.
    """
    if not kernels:
        return None
    runs = Counter(kernel.name for kernel in kernels)
    codes: dict[str, list[str]] = {}
    for name, code in launched:
        codes.setdefault(name, []).append(code)
    known = {name: iter(found) for name, found in codes.items() if len(found) == runs[name]}
    rows = [
        [
            kernel.name,
            next(known[kernel.name]) if kernel.name in known else "",
            *([list(kernel.grid), list(kernel.block), kernel.shared_bytes, kernel.nbytes]),
        ]
        for kernel in kernels
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@contextmanager
def launched_code() -> Iterator[list[tuple[str, str]]]:
    """Gathers name and code hash of every Triton, Gluon and CUDA C++ kernel launched inside `with`, in order."""
    launched: list[tuple[str, str]] = []
    with ExitStack() as stack:
        triton = sys.modules.get("triton.runtime.jit")
        if triton is not None and not interpreting():
            stack.enter_context(_noting(triton.JITFunction, "run", _of_triton, launched))
        cuda = sys.modules.get("rooflab.kernels._cuda")  # only where a kernel has imported it: it needs CuPy
        if cuda is not None:
            stack.enter_context(_noting(cuda.CudaKernel, "__call__", _of_cuda, launched))
        yield launched


@contextmanager
def _noting(
    owner: Any, method: str, note: Callable[..., tuple[str, str] | None], launched: list[tuple[str, str]]
) -> Iterator[None]:
    """Makes `owner`'s method append what `note` says of itself, its result and its keyword arguments."""
    original = getattr(owner, method)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        found = note(self, result, kwargs)
        if found is not None:
            launched.append(found)
        return result

    setattr(owner, method, noting)
    try:
        yield
    finally:
        setattr(owner, method, original)


def _of_triton(function: Any, kernel: Any, options: Mapping[str, Any]) -> tuple[str, str] | None:
    if kernel is None or options.get("warmup"):
        return None
    return str(kernel.metadata.name), code_hash(kernel.asm["cubin"])


def _of_cuda(kernel: Any, result: None, options: Mapping[str, Any]) -> tuple[str, str]:
    from rooflab.kernels._cuda import architecture, cubin_file

    file = cubin_file(kernel.source, arch=architecture(), options=kernel.options)  # compiled before, and kept
    return kernel.name, code_hash(file.read_bytes())


def code_hash(cubin: bytes) -> str:
    """SHA-256 over a cubin's instructions and constants.  Raises `ValueError` on what is no 64-bit ELF file."""
    sections = elf_sections(cubin)
    digest = hashlib.sha256()
    for name in sorted(sections):
        if name.startswith(CODE_SECTIONS):
            digest.update(f"{name}:{len(sections[name])}:".encode() + sections[name])
    return digest.hexdigest()


def elf_sections(binary: bytes) -> Mapping[str, bytes]:
    """The sections of a little-endian 64-bit ELF file by name (System V ABI, "Sections")."""
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"cubin: expected a little-endian 64-bit ELF file, got {binary[:6]!r}")
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    entry, count, names_index = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, table + entry * index) for index in range(count)]
    _, _, _, _, names_at, names_size = headers[names_index]
    names = binary[names_at : names_at + names_size]
    found = {}
    for name_at, kind, _, _, offset, size in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        found[name] = b"" if kind == 8 else binary[offset : offset + size]  # 8: takes no space in the file
    return found
