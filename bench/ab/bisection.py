"""The lines for a shell with which `git bisect run` finds the commit that made a kernel slower.

The bisection checks out no files: each step is an A/B of two revisions, which builds the trees of both itself.  Exit
statuses of `rooflab ab --strict` become git's: 0 is good; 10 (SLOWER) is bad; 11 (INCORRECT or FAILED) is bad if that
is what is looked for; 2 ends the bisection; what cannot be told is asked once more with twice the pairs, then skipped.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rooflab.bench.base.git import git
from rooflab.bench.revisions.trees import resolve


def bisect_lines(
    words: Sequence[str], good: str, bad: str, repo: Path, *, pairs: int = 12, correctness: bool = False
) -> list[str]:
    """The lines; `words` are the arguments of `rooflab ab` that say what is compared.

    Raises `ValueError` where git does not know a revision, if `good` is no ancestor of `bad`, and on `pairs` below 1.
    """
    if pairs < 1:
        raise ValueError(f"pairs: expected at least 1, got {pairs}")
    good, bad = (resolve(repo, revision, name) for name, revision in (("good", good), ("bad", bad)))
    if good == bad or git(repo, "merge-base", good, bad) != good:
        raise ValueError(f"good: expected an ancestor of {bad[:10]}, got {good[:10]}")
    compared = shlex.join(["rooflab", "ab", *words, "--base", good, "--head", "BISECT_HEAD", "--strict"])
    step = (
        f"for pairs in {pairs} {2 * pairs}; do {compared} --pairs $pairs; "
        f"case $? in 0) exit 0;; 10) exit 1;; 11) exit {1 if correctness else 125};; 2) exit 128;; esac; "
        "done; exit 125"
    )
    git_in = "git" if repo == Path(".") else f"git -C {shlex.quote(str(repo))}"
    return [
        f"{git_in} bisect start --no-checkout {bad} {good}",
        f"{git_in} bisect run sh -c {shlex.quote(step)}",
        f"{git_in} bisect reset",
    ]
