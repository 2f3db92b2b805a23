"""The checker against kernels that are wrong in one corner, and unusual right ones."""

from __future__ import annotations

import shutil

import pytest
import torch
from check_attacks import first_fault, loaded

from rooflab.bench.core.outside import Checkers

CPU = torch.device("cpu")
COMPILER = shutil.which("c++") or shutil.which("g++")
FOUND_S, TAKEN_S = 30.0, 5.0
"""Seconds for the checks of a wrong and of a right kernel, on one core; results/check_attacks.md has those of 90 s."""
SEED = 20
COUNTS = {"wrong.py": 60, "everyday_inputs.py": 38, "everyday_runs.py": 36, "unusual.py": 15, "rightful.py": 33}


def each(*files):
    """Parameters for the kernels of files, by number: the seed draws 3 for `test-more`."""
    numbers = [(file, number) for file in files for number in range(COUNTS[file])]
    return lambda test: pytest.mark.sampled(0, 3)(pytest.mark.parametrize("file, number", numbers)(test))


def fault_of(file, number, limit_s):
    with loaded([file]) as kernels:
        assert len(kernels) == COUNTS[file] or not COMPILER, "those made by torch.compile need one"
        return first_fault(kernels[number % len(kernels)], SEED, Checkers(CPU), limit_s)


@each("wrong.py", "everyday_inputs.py", "everyday_runs.py")
def test_a_wrong_kernel_is_found(file, number):
    found = fault_of(file, number, FOUND_S)
    assert found.fault, f"{found.kernel} passes {found.checks} checks"


@each("unusual.py", "rightful.py")
def test_a_right_kernel_is_not_refused(file, number):
    assert fault_of(file, number, TAKEN_S).fault == ""
