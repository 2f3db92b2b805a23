"""Checks on all cores: which checks come first, and what ends them at a limit."""

import time

import pytest
import torch

from rooflab.bench.checks.drawn import listed_checks, principles_first
from rooflab.bench.core import outside
from rooflab.bench.core.check_data import CheckResult, CheckTask
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.process import Pool
from rooflab.bench.core.select import Selection
from rooflab.kernels import registry
from rooflab.kernels.registry import get_op
from rooflab.reference.spec import SCHEMES

CASE = get_op("rmsnorm").get_cases("smoke")[0]


def test_the_first_check_of_each_principle_comes_early():
    asked = ["first", "", "empty", "empty", "sizes", ""]
    assert principles_first([*enumerate(asked)], lambda item: item[1].replace("first", "")) == [
        *((0, "first"), (2, "empty"), (4, "sizes"), (1, ""), (3, "empty"), (5, ""))
    ]


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
