"""Finds Rooflab's cache folder, and checks that a folder is writable."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder `$ROOFLAB_CACHE`, or `~/.cache/rooflab` if the variable is not set."""
    return Path(environment.get("ROOFLAB_CACHE") or Path.home() / ".cache" / "rooflab")


def check_caches(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `ValueError` unless Rooflab's cache is writable.  If Triton compiles, checks Triton's cache too."""
    check_writable("ROOFLAB_CACHE", cache_folder(environment))
    if environment.get("TRITON_INTERPRET") != "1":
        home_dir = Path(environment.get("TRITON_HOME") or Path.home())
        check_writable("TRITON_CACHE_DIR", Path(environment.get("TRITON_CACHE_DIR") or home_dir / ".triton" / "cache"))


def check_writable(name: str, folder: Path) -> None:
    """Raises `ValueError` if `folder` cannot be made or is not writable.  The error message begins with `name`."""
    try:
        with tempfile.TemporaryDirectory(dir=next(p for p in (folder, *folder.absolute().parents) if p.exists())):
            return
    except OSError as error:
        problem_text = f"{str(folder)!r} ({error.strerror})"
        raise ValueError(f"{name}: expected a folder that can be written to, got {problem_text}") from error
