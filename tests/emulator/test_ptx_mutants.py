"""Tests that the emulator notices missing synchronisation: every registered kernel with barriers or asynchronous
copies, with each of its waits, fences, barriers and commits dropped or weakened, one at a time.

A mutant is flagged if the emulator reports a race or raises an error, or if the output is wrong.  Some instructions of
a compiler order nothing that is not ordered anyway; the files `redundant_*.json` of `mutant_targets` list these, each
with the reason.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from mutant_targets import REDUNDANT, TARGETS
from mutant_targets.target import BARRIERS
from ptx_mutants import mutants
from ptx_processes import asked

from rooflab.bench.compile.cases import KernelCase, Query
from rooflab.bench.compile.static import CompileFailure, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.bench.core.call import packed
from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.kernels import registry

SCHEMES = {"bf16", "fp8_e4m3"}

SEEDS = (0, 1)
"""Warps together as far as they go, and an order drawn."""
CLEAN_SEEDS = (0, 1, 2, 3)
LEAST_FLAGGED = 0.95
MOST_REDUNDANT = 0.15
"""Of what the kernel's author asked for: of the barriers that Triton and Gluon place by themselves there are more than
are needed.  Each of them has to be flagged or argued as well.  So have barriers of a warp, which do not count either:
the emulator, which runs the lanes of a warp in lockstep, sees only those that a release of one lane needs."""
QUICK = [name for name, target in TARGETS.items() if target.quick]


@cache
def ran(name: str, quick: bool = False) -> dict[str, Any]:
    """What came of a target's mutants."""
    target = TARGETS[name]
    request = {"op": target.op, "kernel": target.kernel, "cases": target.cases, "config": target.config}
    request |= dict(target.options)
    only, clean = (target.quick, SEEDS[1:]) if quick else (None, CLEAN_SEEDS)
    return asked({**request, "seeds": SEEDS, "clean_seeds": clean, "only": only})


@pytest.mark.more
@pytest.mark.parametrize("name", QUICK)
def test_a_few_mutants_of_each_kind_of_pipeline_are_flagged(name: str) -> None:
    found = ran(name, quick=True)
    assert found["clean"] == []
    assert [item["name"] for item in found["mutants"] if item["flagged"]] == [item["name"] for item in found["mutants"]]
    assert {item["name"] for item in found["mutants"]} == set(TARGETS[name].quick)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted({f"{target.op}/{target.kernel}" for target in TARGETS.values()}))
def test_mutants_are_flagged_or_argued_redundant(kernel: str) -> None:
    names: list[str] = []
    argued, missed, flagged = set(), [], 0
    placed = "$^" if registry.get_kernel(*kernel.split("/")).backend == "cuda" else BARRIERS
    for name, target in TARGETS.items():
        if f"{target.op}/{target.kernel}" != kernel:
            continue
        found, reasons = ran(name), REDUNDANT.get(name, {})
        assert found["clean"] == [], f"{name} as it is"
        assert reasons.keys() <= {item["name"] for item in found["mutants"]}, f"{name} has no such mutants"
        wrongly = [item["name"] for item in found["mutants"] if item["flagged"] and item["name"] in reasons]
        assert not wrongly, f"{name}: flagged, so not redundant: {wrongly}"
        names += [f"{name}: {item['name']}" for item in found["mutants"]]
        argued |= {f"{name}: {reason}" for reason in reasons}
        flagged += sum(item["flagged"] is not None for item in found["mutants"])
        missed += [f"{name}: {item['name']}" for item in found["mutants"] if not item["flagged"]]
    unargued = [text for text in missed if text not in argued]
    asked_for = [text for text in names if not re.search(rf"{placed}|bar\.warp\.sync", text)]
    own = argued.intersection(asked_for)
    print(
        f"{kernel}: {len(names)} mutants, {flagged} flagged, {len(argued)} argued redundant; without barriers that a "
        f"compiler placed {len(asked_for)} and {len(own)}; not flagged: {unargued}"
    )
    assert flagged >= LEAST_FLAGGED * (len(names) - len(argued)), f"not flagged: {unargued}"
    assert len(own) <= MOST_REDUNDANT * len(asked_for) or len(argued) <= MOST_REDUNDANT * len(names)


def test_every_target_has_a_config_of_its_kernel_and_every_redundant_mutant_a_reason() -> None:
    for target in TARGETS.values():
        if target.config is not None:
            registry.get_kernel(target.op, target.kernel).tunable.make_config(dict(target.config))
    assert REDUNDANT.keys() <= TARGETS.keys()
    assert all(reason.endswith(".") for reasons in REDUNDANT.values() for reason in reasons.values())


def texts_of(items: list[KernelCase]) -> dict[str, list[str]]:
    """By kernel: the PTX of everything that it launches on these cases."""
    compiled = [item for item in items if item.registered.backend != "cuda"]
    texts: dict[str, list[str]] = {item.registered.id: [] for item in items}
    for item, result in zip(compiled, compile_kernels(compiled, Store()), strict=True):
        assert not isinstance(result, CompileFailure), str(result)
        texts[item.registered.id] += [info.ptx for info in result]
    for item in items:
        kernel, spec = item.registered, registry.get_op(item.op)
        if kernel.backend == "cuda":
            inputs = spec.make_inputs(item.case, item.scheme, torch.device("meta"), 0)
            given = {
                name: value.to("meta") if isinstance(value, torch.Tensor) else value  # lengths and tables are real
                for name, value in inputs.items()
                if name in kernel.accepted
            }
            prepared = spec.prepared
            if kernel.prepare is not None and prepared is not None:
                given[prepared] = packed(kernel.prepare, prepared, given)
            with emulating_cuda(lambda launch, grid, args, own=texts[kernel.id]: own.append(launch.ptx)):
                kernel.fn(**given)
    return texts


@pytest.mark.slow
def test_every_registered_kernel_that_orders_its_warps_is_a_target() -> None:
    # Not those of other projects, whose packages may be missing: `select` leaves peers out.
    every = [
        item
        for op, spec in registry.ops().items()
        for item in Query(op, (), ("llama3_8b",), (), sorted(SCHEMES & set(spec.schemes)), every_case=True).select()
    ]
    # The most and the least work in each dtype.
    ends = [{(item.registered.id, item.scheme.name): item for item in order} for order in (every, reversed(every))]
    launched = texts_of([item for end in ends for item in end.values()])
    assert all(launched.values())
    found = {name for name, texts in launched.items() if any(next(mutants(text), None) for text in texts)}
    assert found == {f"{target.op}/{target.kernel}" for target in TARGETS.values()}
