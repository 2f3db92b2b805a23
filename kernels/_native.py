"""Builds C++ kernels for the CPU with the machine's compiler, once for each source, and calls them by ctypes.

A call with two tensors takes 3 us, as much as a call through torch's dispatcher. The cache folder keeps each built
library. Parallel loops run on torch's OpenMP threads, because threads of a second runtime would compete for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rooflab.kernels._folders import cache_folder, check_writable

HEADERS = sorted(Path(__file__).parent.glob("_native*.h"))
COMPILER_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number that stands for each dtype in a C++ function."""
REPLAY_CPP = '#include "_native.h"\nextern "C" int replay(const Slot* slots) { return unpacked(run, slots); }\n'
"""The second entry of each C++ file, for `_replay.py`."""
TYPES = {"i": ctypes.c_int, "n": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}


@cache
def compiler() -> str | None:
    """Returns the path of the C++ compiler: `$CXX`, g++ or clang++.  Returns None if there is no compiler."""
    compiler_names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for tool in compiler_names if tool and (path := shutil.which(tool))), None)


def why_no_compiler() -> str | None:
    """Returns the reason why C++ kernels cannot be built here, or None if they can be built."""
    if not Path("/proc/self/maps").is_file():
        return "needs Linux"
    compiler_path = compiler()
    return _why_too_old(compiler_path) if compiler_path else "needs a C++ compiler (g++, clang++ or $CXX)"


@cache
def _why_too_old(path: str) -> str | None:
    """Returns the reason why the compiler at `path` cannot compile this project's headers, or None.  Tests each
    compiler once."""
    hashed_texts = (_version(path), *(header.read_text() for header in HEADERS), *COMPILER_OPTIONS)
    compiler_ok_path = _folder() / f"understood-{hashlib.sha256(repr(hashed_texts).encode()).hexdigest()[:24]}"
    if compiler_ok_path.is_file():
        return None
    check_command = [path, *COMPILER_OPTIONS, "-fsyntax-only", "-x", "c++", *map(str, HEADERS)]
    compiler_process = subprocess.run(check_command, capture_output=True, text=True, check=False)
    if compiler_process.returncode:
        return f"needs GCC 12 or Clang 15; {path} says: {_first_error(compiler_process.stderr)}"
    check_writable("ROOFLAB_CACHE", compiler_ok_path.parent)
    compiler_ok_path.parent.mkdir(parents=True, exist_ok=True)
    compiler_ok_path.touch()
    return None


@cache
def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def _folder() -> Path:
    return cache_folder() / "native"


def _first_error(text: str) -> str:
    return next((error_line for error_line in text.splitlines() if "error" in error_line), text.strip())


class NativeFunction:
    """Calls the function `run` of a C++ file."""

    def __init__(self, source: Path, types: str):
        cpp_lib: Any = ctypes.CDLL(str(library(source)))
        self.run, self.entry, self._types = cpp_lib.run, ctypes.cast(cpp_lib.replay, ctypes.c_void_p).value, types
        self.run.restype, self.run.argtypes = ctypes.c_int, [TYPES[type_letter] for type_letter in types]

    def __call__(self, *arguments: Any) -> int:
        """Calls the C++ function.  Returns 0, or the number of the argument check that failed."""
        if note_launch is not None:
            note_launch(self, arguments)
        return self.run(*arguments)  # type: ignore[no-any-return]

    def addresses(self, arguments: tuple[Any, ...]) -> list[int]:
        """Returns the addresses of tensors, which are some of the arguments."""
        typed_arguments = zip(self._types, arguments, strict=True)
        return [address for type_letter, address in typed_arguments if type_letter == "p" and isinstance(address, int)]

    def slots(self, arguments: tuple[Any, ...], moved: Callable[[int], int]) -> ctypes.Array[ctypes.c_uint64]:
        """Packs each argument in 8 bytes (a slot) for a replay.  `moved` gives a tensor's address in the replay."""
        slot_values = []
        for type_letter, argument in zip(self._types, arguments, strict=True):
            if type_letter == "f":
                argument = int.from_bytes(struct.pack("<f", argument), "little")
            elif type_letter == "p" and not isinstance(argument, int):
                argument = 0 if argument is None else ctypes.addressof(argument)
            elif type_letter == "p":
                argument = moved(argument)
            slot_values.append(argument & 0xFFFF_FFFF_FFFF_FFFF)
        return (ctypes.c_uint64 * len(slot_values))(*slot_values)


note_launch: Callable[[NativeFunction, tuple[Any, ...]], None] | None = None
"""Gets each function and its arguments while a recording runs (`_replay.py`), else None."""


@cache
def built(source: Path, types: str) -> NativeFunction:
    """Returns the function `run` of a C++ file, built for this processor.

    `types` has a letter per argument: i (int), n (int64), f (float) or p (pointer).  Raises `ValueError` with the
    compiler's first error."""
    return NativeFunction(source, types)


def sizes(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    """Returns the `numbers` as an array of 64-bit integers.  A C++ function takes this array as a pointer."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def library(source: Path) -> Path:
    """Returns the path of the library built from a C++ file.  Raises `ValueError` with the compiler's first error."""
    path = compiler()
    if path is None:
        raise ValueError(f"{source.parent.name}/{source.stem}: {why_no_compiler()}")
    openmp_path = _openmp_of_torch()
    headers = (header.read_text() for header in HEADERS)
    lib_texts = (source.read_text(), REPLAY_CPP, *headers, _version(path), processor(), openmp_path, *COMPILER_OPTIONS)
    build_hash = hashlib.sha256("\0".join(lib_texts).encode()).hexdigest()[:24]
    library_path = _folder() / f"{source.parent.name}-{build_hash}.so"
    if library_path.is_file():
        return library_path
    library_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library_path.parent) as temp_folder:
        obj_path, linked_library = Path(temp_folder) / "compiled.o", Path(temp_folder) / "linked.so"
        # In two steps, because with -fopenmp the linker would take the compiler's own runtime.
        unit = f'#include "{source}"\n{REPLAY_CPP}'
        _run([path, *COMPILER_OPTIONS, f"-I{HEADERS[0].parent}", "-c", "-xc++", "-", "-o", str(obj_path)], source, unit)
        _run([path, "-shared", str(obj_path), openmp_path, "-o", str(linked_library)], source)
        linked_library.replace(library_path)
    return library_path


def _run(command: list[str], source: Path, text: str = "") -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False, input=text)
    if process.returncode:
        raise ValueError(f"{source.parent.name}/{source.stem}: the compiler failed: {_first_error(process.stderr)}")


def _openmp_of_torch() -> str:
    """Returns the path of the OpenMP library that torch loaded in this process, or else of another loaded one. Returns
    `-lgomp` if no OpenMP library is loaded."""
    library_paths = re.findall(r"(/\S*lib[gi]omp\S*\.so\S*)", Path("/proc/self/maps").read_text())
    return next((path for path in library_paths if "/torch/" in path), library_paths[0] if library_paths else "-lgomp")


def processor() -> str:
    """Returns the processor's model and features.  A library that was built for another processor may not run here."""
    cpu_lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(cpu_line for cpu_line in cpu_lines if cpu_line.startswith(("model name", "flags")))
