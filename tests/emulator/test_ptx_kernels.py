"""Tests that Triton's code for Hopper runs right in the emulator, and that no false race is reported: chosen kernels,
and random matmuls and others.

Seed 0 runs each CTA's warps together as far as possible; other seeds draw an order of warps and of copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ptx_kernels.cases import CASES
from ptx_processes import emulated, races


def _runs() -> Iterator[object]:
    for name, case in CASES.items():
        yield from (pytest.param(name, seed, id=f"{name}-{seed}") for seed in ((0, 1) if case.asynchronous else (0,)))


@pytest.mark.sampled(6, 30)
@pytest.mark.parametrize(("name", "seed"), list(_runs()))
def test_a_compiled_kernel_is_right_and_clean(name: str, seed: int) -> None:
    case = CASES[name]
    found = emulated(case, seed)
    assert "failed" not in found, found["failed"]
    assert found["error"] <= found["allowed"]
    # What ptxas mends is no race.
    assert races(found) == [] and bool(found["notes"]) == bool(case.reported)
    assert all(case.reported in note for note in found["notes"])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tma_NT_bf16", ("wgmma.mma_async", "cp.async.bulk.tensor.2d.shared", "mbarrier.try_wait", "elect.sync")),
        ("tma_device_NT", ("tensormap.replace", "tensormap.cp_fenceproxy", "fence.proxy.tensormap")),
        ("ws_64_persistent", ("setmaxnreg.dec", "setmaxnreg.inc", "barrier.sync", "mbarrier.arrive.shared")),
        ("pointers_3_stages", ("cp.async.cg", "cp.async.wait_group", "wgmma.mma_async")),
        ("tma_add_float32", ("cp.reduce.async.bulk.tensor",)),
        ("dot_small", ("mma.sync", "ldmatrix")),
    ],
)
def test_a_kernel_has_the_instructions_that_it_is_there_for(name: str, wanted: tuple[str, ...]) -> None:
    opcodes = emulated(CASES[name], 0)["opcodes"]
    for start in wanted:
        assert any(opcode.startswith(start) for opcode in opcodes), f"{start} not in {opcodes}"
