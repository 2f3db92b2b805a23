"""What Triton and Gluon compile for Hopper runs right in the emulator, and no race is reported that is not there.

Seed 0 runs each CTA's warps together as far as they go; the others draw an order of warps and of copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ptx_kernels.cases import CASES, NEW, SLOW, Case
from ptx_kernels.trial import Trial, blank
from ptx_processes import OLD_TRITON, KernelWorker, races

OTHER_ORDERS = (1, 2)


@pytest.fixture(scope="module")
def worker() -> Iterator[KernelWorker]:
    made = KernelWorker()
    yield made
    made.stop()


def _case(name: str) -> Case:
    if OLD_TRITON and name in NEW:
        pytest.skip("Gluon of Triton 3.6 has other names")
    return CASES[name]


def _runs() -> Iterator[object]:
    for name, case in CASES.items():
        for seed in (0, *OTHER_ORDERS) if case.asynchronous else (0,):
            yield pytest.param(name, seed, id=f"{name}-{seed}", marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize(("name", "seed"), list(_runs()))
def test_a_compiled_kernel_is_right_and_clean(worker: KernelWorker, name: str, seed: int) -> None:
    case = _case(name)
    found = worker.ask(case, seed)
    assert "failed" not in found, found["failed"]
    assert found["error"] <= found["allowed"]
    if case.reported:
        assert found["races"] and all(case.reported in race for race in found["races"])
    else:
        assert races(found) == []


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tma_NT_bf16", ("wgmma.mma_async", "cp.async.bulk.tensor.2d.shared", "mbarrier.try_wait", "elect.sync")),
        ("tma_device_NT", ("tensormap.replace", "tensormap.cp_fenceproxy", "fence.proxy.tensormap")),
        ("ws_64", ("setmaxnreg.dec", "setmaxnreg.inc", "barrier.sync", "mbarrier.arrive.shared")),
        ("pointers_3_stages", ("cp.async.cg", "cp.async.wait_group", "wgmma.mma_async")),
        ("gluon_specialised", ("setmaxnreg.dec", "cp.async.bulk.tensor.2d.global.shared", "wgmma.wait_group")),
        ("gluon_multicast", ("barrier.cluster", "fence.mbarrier_init")),
        ("gluon_copies_that_arrive", ("cp.async.mbarrier.arrive",)),
        ("tma_add_float32", ("cp.reduce.async.bulk.tensor",)),
        ("dot_small", ("mma.sync", "ldmatrix")),
        ("split_k_last", ("atom.global", "wgmma.mma_async")),
    ],
)
def test_a_kernel_has_the_instructions_that_it_is_there_for(
    worker: KernelWorker, name: str, wanted: tuple[str, ...]
) -> None:
    opcodes = worker.ask(_case(name), 0)["opcodes"]
    for start in wanted:
        assert any(opcode.startswith(start) for opcode in opcodes), f"{start} not in {opcodes}"


def test_what_nobody_wrote_is_not_taken_for_a_right_result() -> None:
    assert Trial(print, [torch.ones(4)], [torch.ones(4).double()]).error() <= 0
    for wrong in (blank(4), torch.tensor([1.0, 1, 1, float("nan")]), torch.tensor([1.0, 1, 1, 1.001])):
        assert not Trial(print, [torch.ones(4), wrong], [torch.ones(4).double()] * 2).error() <= 1e-4
