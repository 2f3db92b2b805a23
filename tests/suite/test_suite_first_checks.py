"""First checks on a card reach every kernel, in a case and dtype that it takes: a kernel without a first check is never
timed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.environment import Environment, Gpu
from rooflab.bench.suite import first, passed
from rooflab.bench.suite.entries import Context
from rooflab.bench.suite.passed import first_taken
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.kernels.takes import Refusal

EVERY = [kernel for op in registry.ops() for kernel in registry.kernels(op).values()]
RISKY = [kernel for kernel in EVERY if kernel.backend not in registry.CPU_BACKENDS]


def test_every_kernel_has_a_case_and_a_dtype_that_it_takes():
    for kernel in RISKY:
        case, scheme = first_taken(kernel, "bf16")
        spec = registry.get_op(kernel.op)
        small = case in (*spec.cases["smoke"], *spec.cases["edge"])
        assert scheme.name in spec.schemes, kernel.id
        assert small or kernel.role == "peer", f"{kernel.id}: an oracle of a model's size takes seconds"


OPS = ("gemm", "gemm_fp8", "gemm_w4a16", "flash_attention")
OURS = {kernel.id for kernel in RISKY if kernel.op in OPS and kernel.role != "peer"}
CARD = Gpu("NVIDIA H100 80GB HBM3", "GPU-1", 85 * 10**9, 132, 50 * 2**20)


@pytest.fixture
def first_checks(monkeypatch, tmp_path):
    """The first checks on a card that is not there, of which `how` says what becomes of each kernel; and the tried."""
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    here = Environment.now()
    monkeypatch.setattr(first.Environment, "now", lambda: replace(here, gpu=CARD))
    monkeypatch.setattr(
        Kernel, "why_not_here", lambda k, _: Refusal("UNAVAILABLE", "not installed") if k.role == "peer" else None
    )

    def run(folder, how=lambda kernel: ("OK", ""), **options):
        tried: dict[str, str] = {}

        def check(checkers, item):
            kernel, case, scheme, *_ = item
            tried[kernel.id] = scheme.name
            status, reason = how(kernel)
            asked = kernel.op, kernel.name, kernel.backend, case, scheme.name, "cuda", 0
            return CheckResult(*asked, status, "gpu", reason=reason)

        monkeypatch.setattr(first.Checkers, "__call__", check)
        return first.first_checks(Context(tmp_path / folder, seconds=100.0), OPS, **options), tried

    return run


def test_what_is_right_is_verified_and_what_fails_or_is_not_installed_costs_itself_alone(first_checks):
    def how(kernel):
        if kernel.name == "gemv":
            raise json.JSONDecodeError("a broken trace", "{", 1)
        return ("INCORRECT", "off") if kernel.name == "swap_ab" else ("OK", "")

    found, tried = first_checks("one", how)
    assert tried.keys() == OURS and tried["gemm_fp8/promoted"] == tried["flash_attention/fp8"] == "fp8_e4m3"
    assert found.excluded.keys() == {name for name in OURS if name.endswith(("/gemv", "/swap_ab"))}
    assert found.excluded["gemm/swap_ab"] == "INCORRECT: off" and found.status == "DONE"
    assert "JSONDecodeError: a broken trace" in found.excluded["gemm/gemv"]
    assert found.figures["right"] == len(OURS) - len(found.excluded)
    assert found.figures["not here"] == sum(k.role == "peer" and k.op in OPS for k in RISKY)
    order = [registry.get_kernel(*name.split("/")).backend for name in tried]
    assert order.index("gluon") > order.index("triton"), "what waits at barriers comes last"


def test_a_later_visit_checks_what_changed_or_failed_and_nothing_else(first_checks, monkeypatch, tmp_path):
    first_checks("one", lambda k: ("TIMEOUT", "no answer") if k.name == "tma" else ("OK", ""))
    shutil.rmtree(tmp_path / "cache")
    code = passed.Passed.code
    monkeypatch.setattr(passed.Passed, "code", lambda self, k: "new" if k.name == "promoted" else code(self, k))
    found, tried = first_checks("two", trust=tmp_path / "one")
    changed = {name for name in OURS if name.endswith(("/promoted", "/tma"))}
    assert tried.keys() == changed and not found.excluded
    assert found.figures["right before"] == len(OURS) - len(changed)
    assert first_checks("three")[1] == {}, "on this machine nothing is checked twice"
    shutil.rmtree(tmp_path / "cache")
    here = Environment.now()
    monkeypatch.setattr(first.Environment, "now", lambda: replace(here, gpu=replace(CARD, name="NVIDIA H200")))
    assert first_checks("four", trust=tmp_path / "one")[1].keys() == OURS, "another card trusts nothing of it"
