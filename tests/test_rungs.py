"""Each rung's compiled code differs from the rung below in the respect that its op's ladder claims.

A rung of our own code is compiled for Hopper at the most work of llama3_8b.  Where it, or the one below it, is made of
torch calls, those are compared: on a GPU every call that is no view is a launch or more.  The claims themselves stand
in `tests/rungs_*.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from rung_claims import CLAIMS

from rooflab.kernels.registry import Kernel, kernels, ops

for _file in sorted(Path(__file__).parent.glob("rungs_*.py")):
    import_module(_file.stem)

NOT_COMPARED = {
    "gemm/packed": "the weight's layout is oneDNN's own, which nothing shows; `rooflab bench gemm` shows what it saves",
}
"""Rungs whose difference neither code nor calls show, and why."""


def _rungs() -> Iterator[Kernel]:
    for op in ops():
        yield from (kernel for kernel in kernels(op).values() if kernel.role == "optimized")


@pytest.mark.parametrize("kernel", [pytest.param(kernel, id=kernel.id) for kernel in _rungs()])
def test_the_code_of_a_rung_differs_as_its_ladder_claims(kernel):
    if kernel.id in NOT_COMPARED:
        pytest.skip(NOT_COMPARED[kernel.id])
    assert kernel.id in CLAIMS, f"{kernel.id}: say here in which respect its code differs from the rung below"
    CLAIMS[kernel.id]()


def test_no_claim_is_about_a_kernel_that_is_gone():
    assert {*CLAIMS, *NOT_COMPARED} <= {kernel.id for kernel in _rungs()}
