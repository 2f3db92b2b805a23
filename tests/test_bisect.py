"""`rooflab bisect` on a git repository of 12 commits, with A/Bs that answer by commit."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from needs import skip_without

from rooflab.bench.ab import bisection
from rooflab.bench.ab.bisection import Question, bisect

COMMITS = 12


def git(root, *arguments):
    identity = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b.c", "GIT_COMMITTER_NAME": "A"}
    identity |= {"GIT_COMMITTER_EMAIL": "a@b.c", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    skip_without("git")
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, env=os.environ | identity, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original") / "repo"
    git(root.parent, "init", "--quiet", "--initial-branch=main", str(root))
    for number in range(COMMITS):
        (root / "number").write_text(str(number))
        git(root, "add", "number")
        git(root, "commit", "--quiet", "--message", f"commit {number}")
    return root, git(root, "rev-list", "--reverse", "HEAD").split()


@pytest.fixture
def repo(original, tmp_path):
    """A checkout of 12 commits and the list of them, oldest first."""
    root = shutil.copytree(original[0], tmp_path / "repo")
    git(root, "status")  # so that the index knows the copies
    return root, original[1]


class FakeAb:
    """Answers like `rooflab ab --base GOOD --head REV`: by the head's number, a list giving one answer a call."""

    def __init__(self, commits, answers, default):
        self.commits, self.answers, self.default = commits, dict(answers), default
        self.calls = []

    def __call__(self, command):
        options = dict(zip(command, command[1:], strict=False))
        number = self.commits.index(options["--head"])
        self.calls.append((number, int(options["--pairs"])))
        assert options["--base"] == self.commits[0] and "--strict" in command
        answer = self.answers.get(number, self.default(number))
        return answer.pop(0) if isinstance(answer, list) else answer


def slower_from(first):
    return lambda number: 10 if number >= first else 0


def search(repo, answers=None, default=None, **question):
    root, commits = repo
    ab = FakeAb(commits, answers or {}, default or slower_from(7))
    found = bisect(Question("gemm", "packed", **question), commits[0], commits[-1], root, run=ab)
    return found, ab


def test_every_first_bad_commit_is_found(repo):
    for first in (1, 6, 11):
        found, ab = search(repo, default=slower_from(first))
        assert found.first_bad == repo[1][first]
        assert len(ab.calls) <= 6, "the bad end, and then by halves"


def test_the_checkout_and_its_worktrees_are_as_before(repo):
    root, commits = repo
    (root / "number").write_text("changed by hand")
    before = git(root, "status", "--porcelain"), git(root, "worktree", "list"), git(root, "for-each-ref")
    search(repo)
    assert (git(root, "status", "--porcelain"), git(root, "worktree", "list"), git(root, "for-each-ref")) == before
    assert (root / "number").read_text() == "changed by hand"
    assert git(root, "rev-parse", "HEAD") == commits[-1] and not (root / ".git" / "BISECT_LOG").exists()


def test_a_flaky_commit_is_asked_once_more_with_twice_the_pairs(repo):
    found, ab = search(repo, {6: [12, 0], 7: [13, 10]}, pairs=10)
    assert found.first_bad == repo[1][7]
    assert {call for call in ab.calls if call[0] in (6, 7)} == {(6, 10), (6, 20), (7, 10), (7, 20)}
    assert all(pairs == 10 for number, pairs in ab.calls if number not in (6, 7))


def test_an_untestable_stretch_leaves_candidates_only_beside_the_culprit(repo):
    commits = repo[1]
    found, _ = search(repo, dict.fromkeys((5, 6), 1))
    assert found.first_bad is None
    assert list(found.candidates) == commits[5:8], "any of the two, or the first that was seen to be slow"
    assert found.reason == "2 of 3 candidates could not be told"
    found, _ = search(repo, dict.fromkeys((3, 4), 13), slower_from(10))
    assert found.first_bad == commits[10] and found.reason == ""


def test_incorrect_is_bad_only_where_it_is_asked_about(repo):
    # Commits 4 to 6 are incorrect, later ones slow.
    assert search(repo, dict.fromkeys((4, 5, 6), 11), correctness=True)[0].first_bad == repo[1][4]
    found, _ = search(repo, dict.fromkeys((4, 5, 6), 11))
    assert found.first_bad is None and list(found.candidates) == repo[1][4:8]


def test_nothing_is_looked_for_where_the_bad_end_is_not_slower(repo):
    found, ab = search(repo, default=lambda number: 0)
    assert found.first_bad is None and found.candidates == () and "is not slower than" in found.reason
    assert len(ab.calls) == 1
    found, _ = search(repo, default=lambda number: 12)
    assert "could not be told from" in found.reason


def test_an_ab_that_refuses_its_arguments_ends_the_bisection(repo):
    root, _ = repo
    with pytest.raises(ValueError, match="^ab: refused gemm --base"):
        search(repo, default=lambda number: 10 if number == COMMITS - 1 else 2)
    assert len(git(root, "worktree", "list").splitlines()) == 1, "its worktree is gone all the same"


def test_ends_that_make_no_sense_are_refused(repo):
    for good, bad, message in [
        ("nowhere", "main", "^good: expected a commit, branch or tag of repo, got 'nowhere'"),
        ("main", "main", "^good: expected an ancestor"),
        ("main", "main~3", "^good: expected an ancestor"),
    ]:
        with pytest.raises(ValueError, match=message):
            bisect(Question("gemm"), good, bad, repo[0], run=lambda command: 10)
    with pytest.raises(ValueError, match="^pairs: expected at least 1, got 0"):
        Question("gemm", pairs=0)


def test_the_arguments_of_the_ab():
    question = Question("gemm", "packed", ("M=1,N=2",), ("fp32", "bf16"), 0.05)
    wanted = "gemm --base a --head b --pairs 12 --strict --kernel packed --case M=1,N=2 --scheme fp32 --scheme bf16"
    assert question.arguments("a", "b", 12) == [*wanted.split(), "--threshold", "0.05"]
    assert "--threshold" not in Question("gemm").arguments("a", "b", 12)


def test_the_command_line_finds_it_or_ends_with_12(rooflab, repo, monkeypatch):
    root, commits = repo
    monkeypatch.setattr(bisection, "execute", FakeAb(commits, {}, slower_from(7)))
    ends = ("--good", commits[0], "--bad", "main", "--repo", root)
    status, out, err = rooflab("bisect", "gemm", "packed", *ends)
    assert status == 0 and out.startswith("first bad commit: " + commits[7][:7]) and out.endswith("commit 7\n")
    assert f"{commits[6][:10]} good: not slower" in err
    status, out, _ = rooflab("bisect", "gemm", *ends, "--json")
    assert status == 0 and json.loads(out)["first_bad"] == commits[7]
    status, out, _ = rooflab("bisect", "gemm", "--good", commits[0], "--bad", commits[5], "--repo", root)
    assert status == 12 and "is not slower than" in out
    status, _, err = rooflab("bisect", "gemm", "--good", "x", "--bad", "main", "--repo", root)
    assert status == 2 and err == "rooflab: --good: expected a commit, branch or tag of repo, got 'x'\n"


def test_the_ab_is_run_as_a_command_and_its_status_is_the_answer(monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, 10)

    monkeypatch.setattr(bisection.subprocess, "run", run)
    monkeypatch.setattr(bisection.sys, "stderr", SimpleNamespace(fileno=lambda: 2))
    assert bisection.execute(["gemm"]) == 10 and asked == [[sys.executable, "-m", "rooflab.bench", "ab", "gemm"]]
