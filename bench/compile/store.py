"""Caches compiled code on disk, so that `rooflab static` compiles nothing twice.

An entry's name is a hash of everything that the entry depends on.  Entries never change, and are written atomically.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from rooflab.bench.base.system_time import time
from rooflab.bench.core import Environment
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder, check_writable

PREFIXES = ("TRITON_", "PTXAS", "NVCC_", "NVRTC_", "CUDA_", "CUPY_", "LLVM_", "MLIR_", "DISABLE_", "ENABLE_", "USE_")
"""The prefixes of environment variables that compilers read."""
IGNORED_NAMES = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_VISIBLE_DEVICES", "CUPY_CACHE_DIR")
"""Variables with such a prefix that do not change compiled code: they name folders, the visible GPU or the mode."""
MAX_IDLE_S = 30 * 24 * 3600.0
"""An entry that was not read for this many seconds is deleted."""
SOURCE_PACKAGES = ("kernels", "reference", "roofline")
"""The packages of this tree that a kernel may import (the house rule of one-way imports)."""
_HASHED_FILES = ("compile_worker.py", "capture.py", "sass.py", "cases.py")


class Store:
    """A folder that caches the answers of the compiling processes."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder or cache_folder() / "static"
        self.hits = 0

    def key(self, message: Mapping[str, Any], tree: str) -> str:
        """Returns the name of the cache entry for a request.  `tree` is the hash of the source files."""
        env_vars = sorted((k, v) for k, v in os.environ.items() if k.startswith(PREFIXES) and k not in IGNORED_NAMES)
        key_text = json.dumps([dict(message), tree, _toolchain(), env_vars], sort_keys=True)
        return hashlib.sha256(key_text.encode()).hexdigest()

    def read(self, key: str) -> dict[str, Any] | None:
        """Returns the cache entry with this name; None if the entry is missing or damaged."""
        answer_path = self._path(key)
        try:
            stored_answer: dict[str, Any] = json.loads(gzip.decompress(answer_path.read_bytes()))
            os.utime(answer_path)
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        self.hits += 1
        return stored_answer

    def write(self, key: str, answer: Mapping[str, Any]) -> None:
        """Stores an answer under `key`.  Raises `ValueError` if the folder cannot be written to."""
        gzip_bytes = gzip.compress(json.dumps(answer).encode(), compresslevel=3)
        check_writable("ROOFLAB_CACHE", self.folder)
        write_whole(self._path(key), gzip_bytes)

    def prune(self) -> None:
        """Deletes all files that were not used for a month: old entries, and unfinished files."""
        oldest_time = time.time() - MAX_IDLE_S
        for stored_file in self.folder.glob("*"):
            try:
                if stored_file.stat().st_mtime < oldest_time:
                    stored_file.unlink()
            except FileNotFoundError:  # another process deleted the file first
                continue

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"


@cache
def _toolchain() -> list[str]:
    reader_hashes = [hashlib.sha256(Path(__file__).with_name(name).read_bytes()).hexdigest() for name in _HASHED_FILES]
    return [platform.python_version(), platform.machine(), torch.__version__, triton.__version__, *reader_hashes]


def tree_hash(tree: Path) -> str:
    """Returns a hash of all source files that a kernel may depend on, including CUDA C++ and tuned configs."""
    return Environment.tree(tree, SOURCE_PACKAGES)
