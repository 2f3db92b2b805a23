"""An A/B with real processes: a kernel's behaviour there becomes its verdict, and changes no other kernel's verdict."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands_in_process import run_command
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.ab import compare, pairs
from rooflab.bench.ab.ab_run import run
from rooflab.bench.ab.ab_worker import answer, check
from rooflab.bench.ab.evidence import difference
from rooflab.bench.ab.pairs import AbSettings
from rooflab.bench.ab.sides import Comparison, Side, Target
from rooflab.bench.base.git import ROOT
from rooflab.kernels import registry

KERNELS = Path(__file__).parent / "ab_kernels.py"
CASE = "T=4,H=32,eps=1e-06"
NAMES = ("honest", "wrong", "wrong_later", "dies_later", "hangs", "dies")
"""Those that end a process come last, so that few processes are started again."""


def target(name, case=CASE):
    return Target("rmsnorm", name, case, "fp32")


def here(side, job, limit_s):
    """What a process of this tree would answer, from this one."""
    return answer(json.loads(json.dumps(job)))


@pytest.mark.more
def test_each_kernel_has_its_own_verdict(monkeypatch):
    """Each against the library's, in one run of one pair; side A, which is right, needs no process of its own."""
    a = Side("library", {name: target("library") for name in (*NAMES, "renamed")})
    b = Side("mine", {name: target(name) for name in NAMES}, files=(KERNELS,))
    process = pairs.ask_process
    monkeypatch.setattr(pairs, "CHECK_LIMIT_S", 6.0)
    monkeypatch.setattr(pairs, "ask_process", lambda side, *job: (process if side is b else here)(side, *job))
    result = run(Comparison(a, b), AbSettings(pairs=1, kernel_s=0.05))
    outcomes = {found.key: found for found in result.outcomes}
    for key, verdict, why in (
        ("honest", "UNRESOLVED", "^1 pair: expected at least 5 for a bound; a change of .*% could not have been seen$"),
        ("wrong", "INCORRECT", "mine: .*first data"),
        ("wrong_later", "INCORRECT", "mine: "),
        ("dies", "FAILED", "mine: RUNTIME_ERROR: its process ended with status 7"),
        ("dies_later", "FAILED", "mine: RUNTIME_ERROR: its process ended with status 7"),
        ("hangs", "FAILED", "mine: TIMEOUT: took longer than 6 s"),
        ("renamed", "MISSING", "library has rmsnorm/library .* mine has not: removed or renamed"),
    ):
        found = outcomes[key]
        assert found.verdict == verdict and re.search(why, found.reason), (key, found.reason)
    honest = outcomes["honest"]
    assert honest.pairs == 1 and honest.baseline_s > 0 and honest.candidate_s > 0, "timed on both sides"
    assert set(result.environments) == {"A", "B"}
    assert difference(result.environments["A"], result.environments["B"]) == ""


@pytest.mark.usefixtures("own_registry")
def test_a_kernel_that_does_not_take_the_small_case_is_checked_on_its_own():
    registry.load_file(KERNELS)
    job = {"seed": 0}
    for case, status in (("T=9,H=32,eps=1e-06", "OK"), (CASE, "UNSUPPORTED")):
        blank = target("picky", case).record("cpu", 0)
        assert check(target("picky", case), blank, job, torch.device("cpu")).status == status


@pytest.mark.more
@pytest.mark.needs("checkout")
def test_two_revisions_are_measured_each_in_its_own_tree(tmp_path, monkeypatch):
    """The commit against the working tree, on one kernel: no verdict is asked of one pair, only that both ran.

    The commit's tree is listed by a process of its own, and the rest is done in this one.
    """
    process, listed = pairs.ask_process, []

    def answers(side, job, limit_s):
        listed.extend([side.tree] if job["mode"] == "list" else [])
        own = job["mode"] == "list" and side.tree != ROOT
        return (process if own else here)(side, job, limit_s)

    monkeypatch.setattr(pairs, "ask_process", answers)
    words = ["ab", "rmsnorm", "--kernel", "library", "--case", CASE, "--base", "HEAD", "--strict", "--json"]
    status, value, errors = run_command([*words, "--pairs", "1", "--kernel-seconds", "0.05", "--out", str(tmp_path)])
    assert status == 13, errors
    (found,) = next(iter(value["tables"].values()))
    assert found["key"].startswith("rmsnorm/library ") and found["verdict"] == "UNRESOLVED"
    assert found["pairs"] == 1 and found["baseline_s"] > 0 and found["candidate_s"] > 0
    assert len(list(tmp_path.glob("*.jsonl"))) == 3 and len(listed) == 2 and len(set(listed)) == 2


def mine(x):
    return torch.softmax(x, -1)


def reference(x):
    return torch.exp(x - x.amax(-1, keepdim=True)) / torch.exp(x - x.amax(-1, keepdim=True)).sum(-1, keepdim=True)


def make_inputs(seed):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def test_compare_takes_any_two_functions(monkeypatch):
    """What its processes do is done in this one."""
    monkeypatch.setattr(pairs, "ask_process", here)
    found = compare(lambda x: mine(x), reference, make_inputs, pairs=1, kernel_s=0.05)
    assert found.verdict == "UNRESOLVED" and found.exit_status == 13 and found.outcome.pairs == 1
    assert str(found).startswith("mine against reference: UNRESOLVED: takes ")
