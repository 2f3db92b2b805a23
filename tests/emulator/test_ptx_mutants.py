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
from ptx_mutants import mutants
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


MUTANTS = {
    "@%p1 bar.sync 1, 128; // bar.sync 0;": {
        "drop bar.sync 1": "// bar.sync 0;",
        "arrive only at bar.sync 1": "@%p1 bar.arrive 1, 128; // bar.sync 0;",
    },
    "// cp.async.commit_group;": {},
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6+8], 24576;": {
        "drop mbarrier.arrive.expect_tx 1": "",
        "fewer bytes in mbarrier.arrive.expect_tx 1": "{ .reg .u32 %mutated; sub.u32 %mutated, 24576, 16; "
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6+8], %mutated; }",
    },
    "mbarrier.try_wait.parity.shared::cta.b64 done, [%r66], %r168; @!done bra again; }": {
        "do not wait in mbarrier.try_wait 1": "setp.eq.u32 done, 0, 0; @!done bra again; }",
        "other parity in mbarrier.try_wait 1": "{ .reg .b32 %mutated; xor.b32 %mutated, %r168, 1; "
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%r66], %mutated; } @!done bra again; }",
    },
    "fence.acq_rel.gpu;": {"drop fence.acq_rel 1": "", "for the CTA alone fence.acq_rel 1": "fence.acq_rel.cta;"},
    # What the text itself shows to be idle is counted, and no mutant.
    "mbarrier.init.shared::cta.b64 [%r3], 1;": {},
    "bar.sync 0;": {"drop bar.sync 2": ""},
    "mbarrier.init.shared::cta.b64 [%r3], 1; ": {},
    "fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128;": {"drop fence.proxy 1": ""},
    "cp.async.bulk.commit_group;": {},
    "cp.async.bulk.wait_group.read 0;": {},
}
"""By the statement: the name of each of its mutants, and what stands in its place."""


def test_mutants_say_what_was_done_and_where_and_are_still_ptx() -> None:
    lines = [".loc 1 7 0", *MUTANTS]
    wanted = [(name, at, new) for at, made in enumerate(MUTANTS.values(), 2) for name, new in made.items()]
    found = []
    for mutant in mutants("\n".join(lines)):
        text = mutant.text.split("\n")
        assert [at for at, (old, new) in enumerate(zip(lines, text, strict=True), 1) if old != new] == [mutant.line]
        assert mutant.source_line == 7
        found.append((mutant.name, mutant.line, text[mutant.line - 1].strip()))
    assert found == wanted
