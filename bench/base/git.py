"""Runs git commands on a repository."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

GIT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
"""The checkout (or installation) of the running program.  `bench` is one of its five folders."""


def git(root: Path, *arguments: str, may_fail: bool = False, stdin: str = "") -> str:
    """Runs git in `root` and returns its English output.  Variables such as `GIT_DIR` are ignored.

    If git fails, raises `ValueError` with git's message.  With `may_fail`, returns the output, then the message.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    # A killed `git status` that may take locks would leave index.lock behind, and the user's next commit fails.
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=GIT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise ValueError(f"git {arguments[0]}: took longer than {GIT_S:.0f} s") from None
    except FileNotFoundError:
        raise ValueError("git: expected it to be installed") from None
    if result.returncode and not may_fail:
        error_lines = result.stderr.strip().splitlines() or [f"status {result.returncode}"]
        raise ValueError(f"git {arguments[0]}: {error_lines[-1]}")
    return (result.stdout + (result.stderr if may_fail else "")).strip()


def git_says(root: Path, *arguments: str) -> str | None:
    """Runs git in `root` and returns its output; None if git fails or is not installed."""
    with suppress(ValueError):
        return git(root, *arguments)
    return None


def top_of(folder: Path) -> Path | None:
    """Returns the root of the git checkout that contains `folder`, or None."""
    top_folder = git_says(folder, "rev-parse", "--show-toplevel")
    return Path(top_folder).resolve() if top_folder else None
