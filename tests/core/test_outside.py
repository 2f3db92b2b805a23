"""Checks on all cores: which checks come first, what ends them at a limit, and the facts that wrong checks share."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rooflab.bench.checks.checking import in_common
from rooflab.bench.checks.drawn import OFFSETS, VALUES, listed_checks, principles_first, principles_tried, shown_by
from rooflab.bench.core import outside
from rooflab.bench.core.check_data import CheckResult, CheckTask
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.process import Pool
from rooflab.bench.core.select import Selection
from rooflab.kernels import registry
from rooflab.kernels.registry import get_op
from rooflab.reference.spec import SCHEMES, Case

CASE = get_op("rmsnorm").get_cases("smoke")[0]


def test_the_first_check_of_each_principle_comes_early_and_the_summary_names_it():
    asked = ["first", "", "empty", "empty", "sizes", ""]
    assert principles_first([*enumerate(asked)], lambda item: item[1].replace("first", "")) == [
        *((0, "first"), (2, "empty"), (4, "sizes"), (1, ""), (3, "empty"), (5, ""))
    ]
    assert shown_by(["first data", "planted values: a row of zeros", "32-bit offsets: far x"]) == {VALUES, OFFSETS}
    ran, asked = SimpleNamespace(status="OK", labels=()), [SimpleNamespace(principle=name) for name in ("empty", "")]
    others = "32-bit offsets, sizes of its file, uneven rows, values, several tiles"
    assert principles_tried(asked, {0: ran}) == f"principles tried: empty; not tried: {others}"
    assert principles_tried(asked, {0: ran, 1: ran}) == f"principles tried: empty; without a case here: {others}"


def test_a_suite_that_some_ops_have_is_checked_on_these():
    asked = listed_checks(Selection.of(None, None, ["square"], None, None, "cpu"))
    assert {item.kernel.op for item in asked} == {name for name, op in registry.ops().items() if "square" in op.cases}


@pytest.mark.parametrize(("status", "kept"), [("OK", True), ("INCORRECT", False), ("TIMEOUT", False)])
def test_a_child_that_ran_a_wrong_kernel_runs_no_other_one(monkeypatch, status, kept):
    def check_kernel(kernel, spec, case, *of):
        return CheckResult(spec.name, kernel.name, kernel.backend, case, "fp32", "cpu", 0, status, "none")

    monkeypatch.setattr(outside, "check_kernel", check_kernel)
    pool, task = Pool("json", limit_s=1.0), CheckTask(registry.get_kernel("rmsnorm", "fused"), CASE, SCHEMES["fp32"])
    with pool.child() as first:
        pass
    Checkers(torch.device("cpu"), pool)(task)
    with pool.child("rmsnorm/cluster ") as second:
        assert (second is first) == kept and first.ended != kept
    pool.stop()


class Waiting(Checkers):
    """Makes a check at once where its seed is 0; else it takes until it is ended, or until one of the two has begun."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.began = []

    def __call__(self, item):
        self.began.append(item.seed)
        return item.seed if item.seed == 0 or not self.over.wait(60) else "ended"


@pytest.mark.parametrize("workers", [1, 2])
def test_what_runs_at_the_limit_is_ended_and_left_out_and_nothing_begins_later(monkeypatch, workers):
    monkeypatch.setattr(outside, "LATE_S", 0.1)
    asked = [CheckTask(registry.get_kernel("rmsnorm", "naive"), CASE, SCHEMES["fp32"], seed) for seed in (0, 1, 2, 3)]
    monkeypatch.setattr(Checkers, "workers", workers)
    assert list(Waiting().each(asked, -1.0)) == []
    make = Waiting()
    assert list(make.each(asked, 0.3)) == [(0, 0)] and make.over.is_set()
    assert sorted(make.began) == list(range(workers + 1))
    make = Waiting()
    turns = make.each(asked)
    assert next(turns) == (0, 0)
    while len(make.began) < 2:
        time.sleep(0.01)
    turns.close()  # as Ctrl-C does
    assert make.over.is_set()


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("N=8,causal=false N=9,causal=false", "N=9,causal=true N=8,causal=true", "causal=true"),
        ("N=8 N=1024", "N=1025 N=4096", "N > 1024"),
        ("N=8 N=64", "N=7 N=1", "N < 8"),
        ("N=32 N=96 N=128", "N=33 N=120 N=40", "N % 16 != 0"),
        ("N=8,layout=NT N=8,layout=NN", "N=8,layout=TN N=8,layout=TT", "layout=TN or layout=TT"),
        ("N=8 N=8", "N=8,bias=true N=8,bias=true", "bias=true"),
        ("N=8 N=3", "N=8 N=5", ""),
        ("N=1,K=4 N=2,K=4", "N=3,K=8 N=4,K=8", "N > 2, K > 4"),
        ("N=8 N=64 N=32", "N=24 N=12", "N that is no power of 2"),
        ("N=1,K=4 N=8,K=4", "N=4,K=4 N=1,K=1", "N = K"),
    ],
)
def test_what_the_wrong_checks_of_a_kernel_share(right, wrong, said):
    results = [
        CheckResult("gemm", "mine", "torch", Case.parse(text), "fp32", "cpu", 0, status, "torch")
        for texts, status in ((right, "OK"), (wrong, "INCORRECT"), ("N=8 N=5000", "UNSUPPORTED"))
        for text in texts.split()
    ]
    results.append(replace(results[0], case=Case.parse("N=17,T=0")))  # of nothing, and so right in any case
    counts = len(wrong.split()), len(right.split())
    shared = f"all {counts[0]} wrong checks have {said}; none of the {counts[1]} right ones has"
    statuses = {"OK": "INCORRECT", "INCORRECT": "OK"}
    assert in_common(results, lambda known, case, scheme: statuses[known.status]) == (shared if said else "")
    assert in_common(results, lambda known, case, scheme: known.status) == "", "a second look does not confirm it"
