"""Checker and bench against kernels that are wrong in one corner or that cheat, and unusual right ones."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rooflab.bench.calls.selection import Selection
from rooflab.bench.check.check import CheckResult
from rooflab.bench.check.spread import Asked, Checkers
from rooflab.bench.commands import drawn_checks
from rooflab.bench.processes.child import environment_without
from rooflab.bench.records.files import read
from rooflab.bench.records.record import NOT_RUN
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel, get_op

FOLDER = Path(__file__).parent / "attacks"
CPU = torch.device("cpu")
SECONDS = 30.0
"""Time for the checks of one kernel, on one core."""
SEED = 20
MISSED = frozenset({"gemm/empty_k", "gemm/no_stride_of_b_is_1"})
"""Wrong kernels that the checker does not find yet: products over K = 0, and of a b whose strides are both above 1."""

HONEST = frozenset({"rmsnorm/claims_traffic"})
"""Cheats that neither the checker nor the bench refuses: a claim that memory could have moved in the time read."""
CHECKS_OF_A_CHEAT = 8


@contextmanager
def loaded(name: str) -> Iterator[list[Kernel]]:
    """The kernels of a file, registered meanwhile."""
    kernels = registry.load_file(FOLDER / name)
    try:
        yield kernels
    finally:
        for kernel in kernels:
            registry._kernels[kernel.op].pop(kernel.name)


def first_failure(kernel: Kernel, check: Callable[[Asked], CheckResult]) -> CheckResult | None:
    """The first check that fails of those that `rooflab check` makes, in fp32 or the op's first scheme."""
    ends = time.monotonic() + SECONDS
    for item in drawn_checks(chosen(kernel)):
        found = check(item)
        if found.status not in ("OK", *NOT_RUN):
            return found
        if time.monotonic() > ends:
            break
    return None


def chosen(kernel: Kernel) -> Selection:
    spec = get_op(kernel.op)
    scheme = "fp32" if "fp32" in spec.schemes else spec.schemes[0]
    return Selection({kernel.op: (kernel,)}, (), (), (scheme,), CPU, SEED)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_wrong_kernels_are_found():
    with loaded("wrong.py") as kernels, Checkers(CPU) as check:
        assert len(kernels) == 60
        missed = {kernel.id for kernel in kernels if first_failure(kernel, check) is None}
    assert missed <= MISSED and len(MISSED) <= 60 - 57


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_unusual_kernels_are_not_refused():
    with loaded("unusual.py") as kernels, Checkers(CPU) as check:
        assert len(kernels) == 15
        assert [found.describe() for kernel in kernels if (found := first_failure(kernel, check))] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cheats_are_refused_by_the_checker_or_the_bench(tmp_path):
    with loaded("cheats.py") as kernels, Checkers(CPU) as check:
        assert len(kernels) == 40
        passed = [
            kernel
            for kernel in kernels
            if all(check(item).status in ("OK", *NOT_RUN) for item in drawn_checks(chosen(kernel))[:CHECKS_OF_A_CHEAT])
        ]
    bench = [sys.executable, "-m", "rooflab.bench", "bench", "--kernel", str(FOLDER / "cheats.py"), "--out"]
    missed, several = set(), environment_without("OMP_NUM_THREADS")  # with one thread none can be taken from the others
    for kernel in passed:
        out = tmp_path / kernel.name
        asked = subprocess.run([*bench, out, kernel.op], env={**several, "ROOFLAB_ATTACK": kernel.name}, check=False)
        statuses = {record.status for record in read(out) if record.kernel == kernel.name} if out.is_dir() else set()
        noise = asked.returncode == 13 and statuses <= {"OK", "NOISY"}  # a busy machine refuses no cheat
        missed |= {kernel.id} if asked.returncode == 0 or noise else set()
    assert missed <= HONEST and len(HONEST) <= 40 - 38
