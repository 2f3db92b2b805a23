"""Checker and bench against kernels that are wrong in one corner or that cheat, and unusual right ones."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from check_attacks import ATTACKS, first_fault, loaded

from rooflab.bench.calls.selection import Selection
from rooflab.bench.check.spread import Checkers
from rooflab.bench.commands import drawn_checks
from rooflab.bench.processes.child import environment_without
from rooflab.bench.records.files import read
from rooflab.bench.records.record import NOT_RUN

CPU = torch.device("cpu")
COMPILER = shutil.which("c++") or shutil.which("g++")
FOUND_S, TAKEN_S = 30.0, 5.0
"""Seconds for the checks of a wrong and of a right kernel, on one core; results/check_attacks.md has those of 90 s."""
SEED = 20
HONEST = frozenset({"rmsnorm/claims_traffic"})
"""Cheats that neither the checker nor the bench refuses: a claim that memory could have moved in the time read."""
CHECKS_OF_A_CHEAT = 8
COUNTS = {"wrong.py": 60, "everyday_inputs.py": 38, "everyday_runs.py": 36, "unusual.py": 15, "rightful.py": 33}


def each(*files):
    """Parameters for the kernels of files, by number: the seed draws one for `make test`, and 5 for `test-more`."""
    numbers = [(file, number) for file in files for number in range(COUNTS[file])]
    return lambda test: pytest.mark.sampled(1, 5)(pytest.mark.parametrize("file, number", numbers)(test))


def fault_of(file, number, limit_s):
    with loaded([file]) as kernels, Checkers(CPU) as check:
        assert len(kernels) == COUNTS[file] or not COMPILER, "those made by torch.compile need one"
        return first_fault(kernels[number % len(kernels)], SEED, check, limit_s)


@each("wrong.py", "everyday_inputs.py", "everyday_runs.py")
def test_a_wrong_kernel_is_found(file, number):
    found = fault_of(file, number, FOUND_S)
    assert found.fault, f"{found.kernel} passes {found.checks} checks"


@each("unusual.py", "rightful.py")
def test_a_right_kernel_is_not_refused(file, number):
    assert fault_of(file, number, TAKEN_S).fault == ""


def chosen(kernel):
    return Selection({kernel.op: (kernel,)}, (), (), ("fp32",), CPU, SEED)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cheats_are_refused_by_the_checker_or_the_bench(tmp_path):
    with loaded(["cheats.py"]) as kernels, Checkers(CPU) as check:
        assert len(kernels) == 40
        passed = [
            kernel
            for kernel in kernels
            if all(check(item).status in ("OK", *NOT_RUN) for item in drawn_checks(chosen(kernel))[:CHECKS_OF_A_CHEAT])
        ]
    bench = [sys.executable, "-m", "rooflab.bench", "bench", "--kernel", str(ATTACKS / "cheats.py"), "--out"]
    missed, several = set(), environment_without("OMP_NUM_THREADS")  # with one thread none can be taken from the others
    for kernel in passed:
        out = tmp_path / kernel.name
        asked = subprocess.run([*bench, out, kernel.op], env={**several, "ROOFLAB_ATTACK": kernel.name}, check=False)
        statuses = {record.status for record in read(out) if record.kernel == kernel.name} if out.is_dir() else set()
        noise = asked.returncode == 13 and statuses <= {"OK", "NOISY"}  # a busy machine refuses no cheat
        missed |= {kernel.id} if asked.returncode == 0 or noise else set()
    assert missed <= HONEST and len(HONEST) <= 40 - 38
