"""How the checker fares against kernels that are wrong in one corner, and with right ones that are unusual."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rooflab.bench.calls.selection import Selection
from rooflab.bench.check.check import CheckResult, check_kernel
from rooflab.bench.commands import drawn_checks
from rooflab.bench.records.record import NOT_RUN
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel, get_op

FOLDER = Path(__file__).parent / "attacks"
SECONDS = 30.0
"""Time for the checks of one kernel, on one core."""
SEED = 20
MISSED = frozenset({"gemm/empty_k", "gemm/no_stride_of_b_is_1"})
"""Wrong kernels that the checker does not find yet: products over K = 0, and of a b whose strides are both above 1."""

REFUSED = frozenset({"rmsnorm/compiled_eager"})
"""Right kernels that the checker refuses; why it refuses this one is not known yet."""


@contextmanager
def loaded(name: str) -> Iterator[list[Kernel]]:
    """The kernels of a file, registered meanwhile."""
    kernels = registry.load_file(FOLDER / name)
    try:
        yield kernels
    finally:
        for kernel in kernels:
            registry._kernels[kernel.op].pop(kernel.name)


def first_failure(kernel: Kernel) -> CheckResult | None:
    """The first check that fails of those that `rooflab check` makes, in fp32 or the op's first scheme."""
    spec = get_op(kernel.op)
    scheme = "fp32" if "fp32" in spec.schemes else spec.schemes[0]
    chosen = Selection({kernel.op: (kernel,)}, (), (), (scheme,), torch.device("cpu"), SEED)
    ends = time.monotonic() + SECONDS
    for item in drawn_checks(chosen):
        found = check_kernel(kernel, spec, item.case, item.scheme, "cpu", SEED, item.planted)
        if found.status not in ("OK", *NOT_RUN):
            return found
        if time.monotonic() > ends:
            break
    return None


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_wrong_kernels_are_found():
    with loaded("wrong.py") as kernels:
        assert len(kernels) == 60
        missed = {f"{kernel.op}/{kernel.name}" for kernel in kernels if first_failure(kernel) is None}
    assert missed <= MISSED and len(MISSED) <= 60 - 57


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_unusual_kernels_are_not_refused():
    with loaded("unusual.py") as kernels:
        assert len(kernels) == 15
        refused = {f"{kernel.op}/{kernel.name}" for kernel in kernels if first_failure(kernel) is not None}
    assert refused <= REFUSED
