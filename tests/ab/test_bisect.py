"""The output of `rooflab bisect`, run by a shell on a repository of 12 commits, with an A/B that answers by commit."""

import json
import os
import subprocess
import sys

import pytest
from git_repository import IDENTITY, git

COMMITS = 12


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A checkout of 12 commits and the list of them, oldest first."""
    root = tmp_path_factory.mktemp("original") / "repo"
    git(root.parent, "init", "--quiet", "--initial-branch=main", str(root))
    for number in range(COMMITS):
        (root / "number").write_text(str(number))
        git(root, "add", "number")
        git(root, "commit", "--quiet", "--message", f"commit {number}")
    return root, git(root, "rev-list", "--reverse", "HEAD").split()


def search(rooflab, repo, tmp_path, answer, *options):
    """What git says at the end, and the numbers and pairs of all A/Bs, if one of `number` and `pairs` answers so."""
    root, commits = repo
    words = ("bisect", "gemm", "packed", "--good", commits[0], "--bad", commits[-1], "--repo", root, "--pairs", "3")
    status, out, err = rooflab(*words, *options)
    assert status == 0, err
    asked, fake = tmp_path / "asked", tmp_path / "rooflab"
    fake.write_text(
        f'#!/bin/sh\nnumber=$(git -C {root} show BISECT_HEAD:number)\necho "$number $@" >> {asked}\n'
        f'for last; do :; done\nexit $({sys.executable} -c "print(({answer})($number, $last))")\n'
    )
    fake.chmod(0o755)
    there = os.environ | IDENTITY | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", out], env=there, capture_output=True, text=True)
    assert git(root, "status", "--short") == "" and git(root, "rev-parse", "HEAD") == commits[-1]
    assert "no bisection" not in done.stderr.lower()
    calls = [line.split() for line in asked.read_text().splitlines()] if asked.exists() else []
    return done.stdout + done.stderr, [(int(call[0]), int(call[-1])) for call in calls], calls


def test_the_first_slow_commit_is_found(rooflab, repo, tmp_path):
    said, asked, calls = search(rooflab, repo, tmp_path, "lambda number, pairs: 10 if number >= 7 else 0")
    assert f"{repo[1][7]} is the first bad commit" in said
    assert len(asked) <= 4 and {pairs for _, pairs in asked} == {3}
    assert calls[0][1:-1] == [
        "ab",
        "gemm",
        "--kernel",
        "packed",
        "--base",
        repo[1][0],
        "--head",
        "BISECT_HEAD",
        "--strict",
        "--pairs",
    ]


def test_what_cannot_be_told_is_asked_with_twice_the_pairs_and_then_skipped(rooflab, repo, tmp_path):
    unsure = "lambda number, pairs: 10 if number >= 7 else 12 if number in (5, 6) and pairs == 3 else 0"
    said, asked, _ = search(rooflab, repo, tmp_path, unsure)
    assert f"{repo[1][7]} is the first bad commit" in said and {(5, 6), (6, 6)} & {*asked}


@pytest.mark.parametrize(("options", "found"), [((), False), (("--correctness",), True)])
def test_a_failing_kernel_tells_nothing_of_its_time_and_is_found_where_it_is_asked_for(
    rooflab, repo, tmp_path, options, found
):
    said, _, _ = search(rooflab, repo, tmp_path, "lambda number, pairs: 11 if number >= 4 else 0", *options)
    assert (f"{repo[1][4]} is the first bad commit" in said) == found


def test_an_ab_that_refuses_its_arguments_ends_the_bisection(rooflab, repo, tmp_path):
    said, asked, _ = search(rooflab, repo, tmp_path, "lambda number, pairs: 2")
    assert "bisect run failed" in said and len(asked) == 1


def test_options_reach_the_ab_and_bad_revisions_are_refused(rooflab, repo):
    root, commits = repo
    ends = ("--good", commits[0], "--bad", "main", "--repo", root)
    options = ("--case", "M=64,N=48,K=32", "--scheme", "bf16", "--threshold", "0.05", "--json")
    status, out, _ = rooflab("bisect", "gemm", *ends, *options)
    assert status == 0 and len(json.loads(out)["lines"]) == 3
    assert "--case M=64,N=48,K=32 --scheme bf16 --threshold 0.05 --base" in json.loads(out)["lines"][1]
    for words, message in (
        (("--good", "x", "--bad", "main"), "good: "),
        (("--good", "main", "--bad", commits[0]), "good: expected an ancestor of"),
        (("--good", commits[0], "--bad", "main", "--pairs", "0"), "pairs: expected at least 1, got 0"),
    ):
        status, _, err = rooflab("bisect", "gemm", *words, "--repo", root)
        assert status == 2 and message in err, err
