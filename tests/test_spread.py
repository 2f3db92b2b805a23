"""Checks on all cores: each result comes with its place, and a process that dies costs its own check alone."""

from __future__ import annotations

import pytest
import torch
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.check.spread import Asked, checkers, in_turn
from rooflab.kernels import registry
from rooflab.kernels.registry import get_op
from rooflab.reference.spec import SCHEMES

CASE = get_op("rmsnorm").get_cases("smoke")[0]
KERNELS = """
import os
from rooflab.kernels.registry import register

@register(op="rmsnorm", name="dies", role="optimized", backend="torch")
def dies(x, weight, eps=1e-6):
    os.kill(os.getpid(), 9)

@register(op="rmsnorm", name="copies", role="optimized", backend="torch")
def copies(x, weight, eps=1e-6):
    return x.clone()
"""


@pytest.mark.usefixtures("own_registry")
def test_results_have_their_places_and_a_death_costs_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(KERNELS)
    registry.load_file(file)
    names = ("dies", "copies", "naive", "copies", "copies")
    asked = [Asked(registry.get_kernel("rmsnorm", name), CASE, SCHEMES["fp32"], planted=False) for name in names]
    with checkers(torch.device("cpu")) as check:
        results = dict(in_turn(asked, check, workers=2))
    assert [results[place].kernel for place in range(5)] == list(names)
    assert [results[place].status for place in range(5)] == [
        "RUNTIME_ERROR",
        "INCORRECT",
        "OK",
        "INCORRECT",
        "INCORRECT",
    ]
    assert results[0].reason.startswith("first data: its process ended with signal SIGKILL")


def test_no_check_but_the_first_begins_after_the_limit():
    made = [], []
    for workers, into in zip((1, 2), made, strict=True):
        asked = [Asked(registry.get_kernel("rmsnorm", "naive"), CASE, SCHEMES["fp32"], seed) for seed in range(3)]
        found = list(in_turn(asked, lambda item, into=into: into.append(item.seed) or item.seed + 10, workers, 0.0))
        assert found == [(0, 10)] and into == [0]
