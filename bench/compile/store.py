"""Compiled code on disk, so that `rooflab static` compiles nothing twice.

An entry is named by a hash of everything that it depends on, and is never changed; it appears whole or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import triton

from rooflab.engine.model_files import cache_folder

CUDA_PACKAGES = ("cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
PREFIXES = ("TRITON_", "PTXAS", "NVCC_", "NVRTC_", "CUDA_", "CUPY_", "LLVM_", "MLIR_", "DISABLE_", "ENABLE_", "USE_")
"""Environment variables that compilers read begin so."""
PLACES = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_VISIBLE_DEVICES", "CUPY_CACHE_DIR")
"""Of these, those that say where files are or which GPU is seen, and change no code."""
UNUSED_S = 30 * 24 * 3600.0
"""An entry that nothing has read for this long is deleted."""
_READERS = (
    "compile/worker.py",
    "compile/capture.py",
    "compile/cuda_capture.py",
    "compile/cubin.py",
    "compile/sass.py",
    "compile/cases.py",
)


class Store:
    """A folder of answers of the compiling processes."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or cache_folder() / "static"
        self.hits = 0
        self.misses = 0

    def key(self, message: Mapping[str, Any], sources: str | None) -> str | None:
        """The name of the entry for a request over sources of this hash; None where the sources are not known."""
        if sources is None:
            return None
        parts = json.dumps([dict(message), sources, _toolchain(), _variables()], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()

    def read(self, key: str) -> dict[str, Any] | None:
        """The entry, or None where there is none or it is damaged."""
        path = self._path(key)
        try:
            entry: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
            if entry["key"] != key:
                raise KeyError("key")
            answer: dict[str, Any] = entry["answer"]
            os.utime(path)
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
            self.misses += 1
            return None
        self.hits += 1
        return answer

    def write(self, key: str, answer: Mapping[str, Any]) -> None:
        """Keeps an answer.  Raises `ValueError` where the folder cannot be written to."""
        content = gzip.compress(json.dumps({"key": key, "answer": answer}).encode(), compresslevel=3)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as part:
                part.write(content)
            Path(part.name).replace(self._path(key))
        except OSError as error:
            raise ValueError(
                f"ROOFLAB_CACHE: expected a folder that can be written to, got {error}; --no-cache does without"
            ) from error

    def prune(self) -> None:
        """Deletes what nothing has read for a month, and what was never finished."""
        limit = time.time() - UNUSED_S
        for file in self.folder.glob("*"):
            try:
                if file.stat().st_mtime < limit:
                    file.unlink()
            except FileNotFoundError:  # another process was quicker
                continue

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:40]}.json.gz"


def can_keep(backend: str) -> bool:
    """Whether a version says all of what compiles this backend's kernels: CUDA C++ may come from a toolkit outside the
    packages, and that one can change under the same name."""
    return backend != "cuda" or all(_version(package) != "absent" for package in CUDA_PACKAGES)


@cache
def _toolchain() -> list[str]:
    bench = Path(__file__).parent.parent
    readers = [hashlib.sha256((bench / name).read_bytes()).hexdigest() for name in _READERS]
    own = [platform.python_version(), platform.machine(), torch.__version__, triton.__version__]
    return [*own, *map(_version, ("numpy", *CUDA_PACKAGES)), *readers]


def _variables() -> list[tuple[str, str]]:
    return sorted((k, v) for k, v in os.environ.items() if k.startswith(PREFIXES) and k not in PLACES)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
