"""The order of commits, as the git history has it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""The checkout (or installation) of the running program."""
TIMEOUT_S = 60.0


def repository(folder: Path | None = None) -> Path | None:
    """The checkout that `folder` lies in, else the running program's; None where neither is one."""
    for place in (folder or Path.cwd(), ROOT):
        found = _git(place, "rev-parse", "--show-toplevel")
        if found is not None:
            return Path(found.strip())
    return None


def commit_order(commits: Iterable[str], root: Path | None) -> dict[str, int]:
    """The place of each commit that the repository at `root` knows, parents before children; others have none."""
    wanted = sorted({commit for commit in commits if commit})
    if root is None or not wanted:
        return {}
    listed = _git(root, "cat-file", "--batch-check", stdin="\n".join(f"{commit}^{{commit}}" for commit in wanted))
    known = [line.split()[0] for line in (listed or "").splitlines() if line.split()[1:2] == ["commit"]]
    if not known:
        return {}
    history = _git(root, "rev-list", "--topo-order", "--reverse", "--stdin", stdin="\n".join(known))
    places = {commit: place for place, commit in enumerate((history or "").split())}
    return {commit: places[commit] for commit in wanted if commit in places}


def _git(root: Path, *arguments: str, stdin: str = "") -> str | None:
    """What git prints, or None where it fails or is not there."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
