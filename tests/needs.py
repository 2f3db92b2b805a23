"""Everything that a test may need beyond Python packages, with one check for each need.

A test says `@pytest.mark.needs("browser")`, and is skipped with the reason if there is no browser. The run's last lines
count all skips by reason. With ROOFLAB_NO_SKIPS=1, as in `.ci/run`, a skip fails unless its reason is in
`skips_allowed.txt`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = frozenset(Path(__file__).with_name("skips_allowed.txt").read_text().splitlines())
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    """The path of a browser that Playwright can drive."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def c_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def _cxx() -> bool:
    from rooflab.kernels._native import why_no_compiler

    return why_no_compiler() is None


def _checkout() -> bool:
    asked = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    return (ROOT / ".git").exists() and asked.returncode == 0


def _loopback() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return True
    except OSError:
        return False


def _weights() -> bool:
    from rooflab.engine.load.model_files import fetch

    try:
        return fetch().is_file()
    except ValueError:  # not in the cache, and no package index within reach
        return False


def _shared_memory() -> bool:
    return os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 256 << 20


def _triton(version: str) -> bool:
    from rooflab.kernels._folders import cache_folder

    return (cache_folder() / "triton" / version).is_dir()


OTHER_TRITONS = ("3.6.0", "3.8.0", "3.9.0")
NEEDS: dict[str, tuple[Callable[[], object], str]] = {
    "browser": (browser, f"a browser on the path ({', '.join(BROWSERS)})"),
    "C compiler": (c_compiler, "a C compiler (cc or gcc)"),
    "C++ compiler": (_cxx, "a C++ compiler (g++, clang++ or $CXX)"),
    "git": (lambda: shutil.which("git"), "git"),
    "checkout": (lambda: shutil.which("git") and _checkout(), "a git checkout of the lab, not an archive of it"),
    "loopback": (_loopback, "a port on 127.0.0.1"),
    "shared memory": (_shared_memory, "256 MB of /dev/shm"),
    "weights": (_weights, "the weights of SmolLM2-135M, in the cache or from the package index"),
    **{
        f"Triton {v}": (partial(_triton, v), f"Triton {v}, as `rooflab emulate --triton` keeps it")
        for v in OTHER_TRITONS
    },
}
"""By name: whether it is here, and the words of the reason."""


@cache
def why_missing(name: str) -> str | None:
    """The reason of the skip, or None where the machine has it."""
    here, words = NEEDS[name]
    return None if here() else f"needs {words}"


def skip_without(name: str) -> None:
    """For helpers and fixtures, which have no markers."""
    if reason := why_missing(name):
        pytest.skip(reason)
