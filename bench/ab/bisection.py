"""Finds the commit that made a kernel slower: drives `git bisect`, where each step is an A/B against the good revision.

The bisection runs in a temporary worktree, which holds git's own files.  So it changes neither the user's checkout nor
a bisection that the user has already started.  The worktree checks out no files: the A/B builds the trees of both
revisions itself.  A step converts the exit status of `rooflab ab --strict` to an answer for git (good, bad, or skip
when the A/B cannot decide):

    0 not slower -> good     10 SLOWER -> bad     11 INCORRECT or FAILED -> bad if `correctness` is set, else skip
    12 UNRESOLVED, 13 INVALID, MISSING or unseen -> once more with twice the pairs, then skip     2 usage -> it ends
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rooflab.bench.records.revisions import git, resolve

FOUND, UNRESOLVED = 0, 12
"""Exit statuses of `rooflab bisect`."""
Answer = Literal["good", "bad", "skip"]
"""The words that git understands."""
Run = Callable[[Sequence[str]], int]
"""Runs `rooflab ab` with these arguments and returns its exit status."""


@dataclass(frozen=True)
class Question:
    """What is compared at each step."""

    op: str
    kernel: str | None = None
    cases: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    threshold: float | None = None
    """The threshold of the A/B; None means the default of `rooflab ab`."""
    pairs: int = 12
    correctness: bool = False
    """Whether the bisection looks for a kernel that fails or is incorrect."""

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs: expected at least 1, got {self.pairs}")

    def arguments(self, base: str, head: str, pairs: int) -> list[str]:
        """The arguments of the `rooflab ab` that compares `head` with `base`."""
        found = [self.op, "--base", base, "--head", head, "--pairs", str(pairs), "--strict"]
        kernels = (self.kernel,) if self.kernel else ()
        for option, values in (("--kernel", kernels), ("--case", self.cases), ("--scheme", self.schemes)):
            for value in values:
                found += [option, value]
        return found if self.threshold is None else [*found, "--threshold", str(self.threshold)]


@dataclass(frozen=True)
class Found:
    """How a bisection ended."""

    candidates: tuple[str, ...]
    """The first bad commit; if the A/B could not decide on some, all commits that may be the first, oldest first."""
    tested: dict[str, str] = field(default_factory=dict)
    """What each step said of its commit, in the order of testing."""
    reason: str = ""
    """Why the bisection ended with no commit or with several; empty if it ended with one commit."""

    @property
    def first_bad(self) -> str | None:
        return self.candidates[0] if len(self.candidates) == 1 and not self.reason else None


def execute(arguments: Sequence[str]) -> int:
    """Runs the A/B, sends its output to standard error, and returns its exit status."""
    command = [sys.executable, "-m", "rooflab.bench", "ab", *arguments]
    return subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode


def step(question: Question, good: str, head: str, run: Run) -> tuple[Answer, str]:
    """Whether `head` is slower than `good`, and why.

    Raises `ValueError` if the A/B refuses its arguments: it would refuse them at every step.
    """
    status = run(question.arguments(good, head, question.pairs))
    again = ""
    if status in (12, 13):
        status = run(question.arguments(good, head, 2 * question.pairs))
        again = f" twice, at last with {2 * question.pairs} pairs"
    if status == 2:
        raise ValueError(f"ab: refused {' '.join(question.arguments(good, head, question.pairs))}")
    if status == 0:
        return "good", "not slower"
    if status == 10:
        return "bad", "SLOWER"
    if status == 11 and question.correctness:
        return "bad", "INCORRECT or FAILED"
    names = {11: "INCORRECT or FAILED", 12: "UNRESOLVED", 13: "INVALID, MISSING or unseen"}
    return "skip", names.get(status, f"ended with status {status}") + again


def bisect(
    question: Question,
    good: str,
    bad: str,
    repo: Path,
    *,
    run: Run | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """The first commit after `good`, up to `bad`, at which the answer changes.

    Compares `bad` first: if `bad` is not slower, there is nothing to find.  Raises `ValueError` if git or the A/B
    refuses, and if `good` is not an ancestor of `bad`.
    """
    good, bad = (resolve(repo, revision, name) for name, revision in (("good", good), ("bad", bad)))
    if good == bad or git(repo, "merge-base", good, bad) != good:
        raise ValueError(f"good: expected an ancestor of {bad[:10]}, got {good[:10]}")
    tested: dict[str, str] = {}

    def ask(commit: str) -> Answer:
        answer, why = step(question, good, commit, run or execute)
        tested[commit] = f"{answer}: {why}"
        tell(f"{commit[:10]} {tested[commit]}")
        return answer

    answer = ask(bad)
    if answer != "bad":
        said = "could not be told from" if answer == "skip" else "is not slower than"
        return Found((), tested, f"{bad[:10]} {said} {good[:10]}, so there is nothing to look for")
    with _worktree(repo, bad) as tree:
        text = git(tree, "bisect", "start", "--no-checkout", bad, good)
        while not _ended(text):
            head = git(tree, "rev-parse", "--verify", "BISECT_HEAD")
            text = git(tree, "bisect", ask(head), head, may_fail=True)
        left = git(tree, "rev-list", "--reverse", "refs/bisect/bad", "--not", "--glob=refs/bisect/good-*").split()
    skipped = [commit for commit in left if tested.get(commit, "").startswith("skip")]
    reason = f"{len(skipped)} of {len(left)} candidates could not be told" if skipped else ""
    return Found(tuple(left), tested, reason)


def _ended(text: str) -> bool:
    """Whether git says that there is nothing left to test.  Raises `ValueError` on an unknown answer of git."""
    if "is the first bad commit" in text or "We cannot bisect more" in text:
        return True
    if "Bisecting: " in text:
        return False
    words = text.splitlines() or ["nothing"]
    raise ValueError(f"git bisect: expected its progress, got {words[-1]!r}")


@contextmanager
def _worktree(repo: Path, commit: str) -> Iterator[Path]:
    """A worktree without files; removed afterwards together with its bisection."""
    with tempfile.TemporaryDirectory(prefix="rooflab-bisect-") as folder:
        tree = Path(folder) / "tree"
        git(repo, "worktree", "add", "--quiet", "--no-checkout", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git(repo, "worktree", "remove", "--force", str(tree))


def subject(repo: Path, commit: str) -> str:
    """A commit in one line: short hash, date and subject."""
    return git(repo, "show", "--no-patch", "--format=%h %cs %s", commit)
