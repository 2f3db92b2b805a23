"""What git says of a checkout; without git, or without a checkout, nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout (or installation) of the running program."""


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout at `root`, and whether a file outside results/ changed; (None, None) if no checkout."""
    top = git_says(root, "rev-parse", "--show-toplevel")
    # A package that is installed inside another project's checkout must not report that checkout's commit.
    if top is None or Path(top).resolve() != root.resolve():
        return None, None
    commit = git_says(root, "rev-parse", "--verify", "HEAD")
    # Ignores results/: a run writes its own records there, and runs no code from there.
    changes = git_says(root, "status", "--porcelain", "--untracked-files=normal", "--", ".", ":!results")
    return commit, None if commit is None or changes is None else bool(changes)


def git_says(root: Path, *arguments: str, stdin: str = "") -> str | None:
    """The output of git, or None if git fails or is not installed."""
    # A killed `git status` that may take locks would leave index.lock behind, and the user's next commit fails.
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
