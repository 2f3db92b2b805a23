"""Whether the emulator sees what is missing: every kernel of the registry that has barriers or asynchronous copies,
with each of its waits, fences, barriers and commits dropped or weakened, one at a time.

A mutant is flagged where the emulator reports a race or raises an error, or where the output is wrong.  Some of what a
compiler emits orders nothing that is not ordered anyway; the files `redundant_*.json` of `mutant_targets` have those,
each with the reason.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from mutant_targets import REDUNDANT, TARGETS
from mutant_targets.target import BARRIERS
from ptx_processes import asked

from rooflab.kernels import registry

SEEDS = (0, 1)
"""Warps together as far as they go, and an order drawn."""
CLEAN_SEEDS = (0, 1, 2, 3)
LEAST_FLAGGED = 0.95
MOST_REDUNDANT = 0.15
"""Of what the kernel's author asked for: of the barriers that Triton and Gluon place by themselves there are more than
are needed.  Each of them has to be flagged or argued as well.  So have barriers of a warp, which do not count either:
the emulator, which runs the lanes of a warp in lockstep, sees none of them."""
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
    print(f"{kernel}: {len(names)} mutants, {flagged} flagged, {len(argued)} argued redundant; without barriers that a "
          f"compiler placed {len(asked_for)} and {len(own)}; not flagged: {unargued}")  # fmt: skip
    assert flagged >= LEAST_FLAGGED * (len(names) - len(argued)), f"not flagged: {unargued}"
    assert len(own) <= MOST_REDUNDANT * len(asked_for) or len(argued) <= MOST_REDUNDANT * len(names)


def test_every_redundant_mutant_is_of_a_target_and_has_a_reason() -> None:
    assert REDUNDANT.keys() <= TARGETS.keys()
    assert all(reason.endswith(".") for reasons in REDUNDANT.values() for reason in reasons.values())
