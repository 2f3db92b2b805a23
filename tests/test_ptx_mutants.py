"""Whether the emulator sees what is missing: every kernel of the registry that has barriers or asynchronous copies,
with each of its waits, fences, barriers and commits dropped or weakened, one at a time.

A mutant is flagged where the emulator reports a race or raises an error, or where the output is wrong.  Some of what a
compiler emits orders nothing that is not ordered anyway; `ptx_redundant_mutants.json` has those, each with the reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ptx_mutants import mutants

from rooflab.bench.code.cases import select
from rooflab.bench.code.store import Store
from rooflab.bench.static import CompileFailure, Request, compile_kernels
from rooflab.kernels.registry import kernels, ops

TESTS = Path(__file__).parent
REDUNDANT: dict[str, dict[str, str]] = json.loads((TESTS / "ptx_redundant_mutants.json").read_text())
OF_CORPUS: dict[str, dict[str, str]] = REDUNDANT.pop("corpus")  # type: ignore[assignment]
"""The same for cases of `ptx_kernels`."""
SEEDS = (0, 1)
"""Warps together as far as they go, and an order drawn."""
CLEAN_SEEDS = (0, 1, 2, 3)
LEAST_FLAGGED = 0.95
MOST_REDUNDANT = 0.15
SECONDS = 280


@dataclass(frozen=True)
class Target:
    """A kernel of the registry, and cases that pass all of it at least three times round its pipeline."""

    op: str
    kernel: str
    cases: tuple[str, ...]
    config: dict[str, Any] | None = None
    quick: tuple[str, ...] = ()
    """Mutants that `make test` runs."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the request, beside these."""


def _gemm(m: int, n: int, warps: int, quick: Sequence[str] = ()) -> Target:
    config = {"block_m": m, "block_n": n, "block_k": 64, "num_warps": warps, "num_stages": 3, "group_m": 8}
    return Target("gemm", "pipelined", (f"M={m},N={n},K=320,layout=NN,bias=true",), config, tuple(quick))


def _flash(m: int, n: int, warps: int, quick: Sequence[str] = ()) -> Target:
    config = {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": 3}
    return Target(
        "flash_attention", "online", (f"B=1,T={m},S={5 * n},H=1,H_kv=1,D=64,causal=false",), config, tuple(quick)
    )


def _paged(block_n: int, stages: int, quick: Sequence[str] = ()) -> Target:
    config = {"block_n": block_n, "num_warps": 4, "num_stages": stages}
    case = "B=2,context=400,H=4,H_kv=2,D=64,block_size=16,ragged=true"
    return Target("paged_attention", "gqa_packed", (case,), config, tuple(quick))


BARRIERS = r"\bbar(rier)?\.(warp\.)?sync\b"
"""Of all warps or a partition's; Gluon emits more of them than are needed."""
TARGETS = {
    "gemm_cooperative": Target(
        "gemm", "cooperative", ("M=136,N=72,K=200,layout=NT,bias=true,residual=true",),
        {"block_m": 128, "block_n": 64, "block_k": 64, "stages": 3, "group_m": 2, "store_n": 32, "lead": 1},
        ("drop mbarrier.arrive 2", "one more pending in wgmma.wait_group 2", "drop fence.proxy.async 3",
         "drop cp.async.bulk.wait_group 1"), (("sms", 1), ("without", BARRIERS)),
    ),
    "gemm_naive": Target("gemm", "naive", ("M=16,N=32,K=100,layout=NN,bias=true",)),
    "gemm_wgmma": _gemm(128, 128, 8, [
        "drop wgmma.fence 1", "drop wgmma.commit_group 1", "one more pending in wgmma.wait_group 1",
        "drop fence.proxy.async 1", "drop bar.sync 2", "drop bar.sync 3",
    ]),
    "gemm_mma": _gemm(32, 64, 4),
    "flash_wgmma": _flash(128, 64, 8, ["drop wgmma.wait_group 2", "drop wgmma.fence 2", "drop bar.sync 3"]),
    "flash_mma": _flash(32, 32, 4),
    "paged_3_stages": _paged(64, 3),
    "paged_5_stages": _paged(32, 5, [
        "drop cp.async.wait_group 1", "one more pending in cp.async.wait_group 3", "drop cp.async.commit_group 6",
        "drop bar.sync 4",
    ]),
    "rmsnorm": Target("rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"num_warps": 4}),
    "fused_add_rmsnorm": Target("fused_add_rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"num_warps": 4}),
    "sample": Target(
        "sample", "bisect",
        ("B=2,V=1200,temperature=0.8,top_k=40,top_p=0.9,min_p=0.02",
         "B=1,V=1200,temperature=0.8,top_k=0,top_p=0.9,min_p=0.0"),
        {"block": 512, "search_block": 256, "num_warps": 4},
    ),
}  # fmt: skip
QUICK = [name for name, target in TARGETS.items() if target.quick]


def asked(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a process of `ptx_mutant_runs`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(TESTS / "ptx_mutant_runs.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@cache
def ran(name: str, quick: bool = False) -> dict[str, Any]:
    """What came of a target's mutants."""
    target = TARGETS[name]
    request = {"op": target.op, "kernel": target.kernel, "cases": target.cases, "config": target.config}
    request |= dict(target.options)
    only, clean = (target.quick, SEEDS[1:]) if quick else (None, CLEAN_SEEDS)
    return asked({**request, "seeds": SEEDS, "clean_seeds": clean, "only": only})


@pytest.mark.parametrize("name", QUICK)
def test_a_few_mutants_of_each_kind_of_pipeline_are_flagged(name: str) -> None:
    found = ran(name, quick=True)
    assert found["clean"] == []
    assert [item["name"] for item in found["mutants"] if item["flagged"]] == [item["name"] for item in found["mutants"]]
    assert {item["name"] for item in found["mutants"]} == set(TARGETS[name].quick)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted({f"{target.op}/{target.kernel}" for target in TARGETS.values()}))
def test_mutants_are_flagged_or_argued_redundant(kernel: str) -> None:
    total, argued, missed, flagged = 0, 0, [], 0
    for name, target in TARGETS.items():
        if f"{target.op}/{target.kernel}" != kernel:
            continue
        found, reasons = ran(name), REDUNDANT.get(name, {})
        assert found["clean"] == [], f"{name} as it is"
        assert reasons.keys() <= {item["name"] for item in found["mutants"]}, f"{name} has no such mutants"
        wrongly = [item["name"] for item in found["mutants"] if item["flagged"] and item["name"] in reasons]
        assert not wrongly, f"{name}: flagged, so not redundant: {wrongly}"
        total, argued = total + len(found["mutants"]), argued + len(reasons)
        flagged += sum(item["flagged"] is not None for item in found["mutants"])
        missed += [f"{name}: {item['name']}" for item in found["mutants"] if not item["flagged"]]
    unargued = [text for text in missed if text.split(": ", 1)[1] not in REDUNDANT.get(text.split(": ", 1)[0], {})]
    print(f"{kernel}: {total} mutants, {flagged} flagged, {argued} argued redundant")
    assert flagged >= LEAST_FLAGGED * (total - argued), f"not flagged: {unargued}"
    assert argued <= MOST_REDUNDANT * total


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["tma_NT_bf16", "ws_64_persistent", "flash_tma", "gluon_specialised", "gluon_in_and_out", "gluon_multicast",
     "split_k_last"],
)  # fmt: skip
def test_mutants_of_what_tma_and_specialised_warps_wait_for_are_flagged(name: str) -> None:
    # Of its barriers of whole CTAs a compiler emits more than are needed; each of the others must count.
    found = asked({"corpus": name, "seeds": SEEDS, "clean_seeds": CLEAN_SEEDS})
    assert found["clean"] == []
    asynchronous = [item for item in found["mutants"] if not re.search(BARRIERS, item["name"])]
    missed = {item["name"] for item in asynchronous if not item["flagged"]}
    assert len(asynchronous) > 10
    assert missed == OF_CORPUS.get(name, {}).keys()


def test_every_redundant_mutant_is_of_a_target_and_has_a_reason() -> None:
    assert REDUNDANT.keys() <= TARGETS.keys()
    assert all(reason.endswith(".") for reasons in REDUNDANT.values() for reason in reasons.values())


@pytest.mark.slow
def test_every_registered_kernel_that_orders_its_warps_is_a_target() -> None:
    requests = {
        kernel.id: Request(kernel.op, kernel.name, item.case, item.scheme)
        for op in ops()
        for kernel in kernels(op).values()
        if kernel.backend in ("triton", "gluon")
        for item in select(kernel.op, (kernel.name,), ("llama3_8b",), (), ("bf16",))
    }
    compiled = dict(zip(requests, compile_kernels(list(requests.values()), Store()), strict=True))
    assert not [name for name, result in compiled.items() if isinstance(result, CompileFailure)]
    found = {name for name, result in compiled.items() if any(next(mutants(info.ptx), None) for info in result)}
    assert found == {f"{target.op}/{target.kernel}" for target in TARGETS.values()}


PTX = """
    .loc 1 7 0
    @%p1 bar.sync 1, 128; // bar.sync 0;
    .loc 1 9 0
    wgmma.wait_group.sync.aligned 1;
    // cp.async.commit_group;
    @!%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6+8], 24576;
    mbarrier.arrive.shared::cta.b64 %rd1, [%r6];
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r66], %r168; @!done bra again; }
    fence.acq_rel.gpu;
    atom.global.gpu.acq_rel.add.u32 %r1, [%rd2], 1;
    ld.shared.b32 %r1, [%r2];
"""


def test_mutants_say_what_was_done_and_where() -> None:
    made = list(mutants(PTX))
    lines, text = PTX.splitlines(), {mutant.name: mutant.text.splitlines() for mutant in made}
    assert [(mutant.name, mutant.line, mutant.source_line) for mutant in made] == [
        ("drop bar.sync 1", 3, 7),
        ("arrive only at bar.sync 1", 3, 7),
        ("drop wgmma.wait_group 1", 5, 9),
        ("one more pending in wgmma.wait_group 1", 5, 9),
        ("drop mbarrier.arrive.expect_tx 1", 7, 9),
        ("fewer bytes in mbarrier.arrive.expect_tx 1", 7, 9),
        ("drop mbarrier.arrive 1", 8, 9),
        ("do not wait in mbarrier.try_wait 1", 9, 9),
        ("other parity in mbarrier.try_wait 1", 9, 9),
        ("drop fence.acq_rel 1", 10, 9),
        ("for the CTA alone fence.acq_rel 1", 10, 9),
        ("relax atom.global 1", 11, 9),
    ]
    for mutant in made:
        changed = [at for at, (old, new) in enumerate(zip(lines, text[mutant.name], strict=True), 1) if old != new]
        assert changed == [mutant.line]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("arrive only at bar.sync 1", "@%p1 bar.arrive 1, 128; // bar.sync 0;"),
        ("one more pending in wgmma.wait_group 1", "wgmma.wait_group.sync.aligned 2;"),
        (
            "fewer bytes in mbarrier.arrive.expect_tx 1",
            "{ .reg .u32 %mutated; sub.u32 %mutated, 24576, 16; "
            "@!%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6+8], %mutated; }",
        ),
        ("drop mbarrier.arrive 1", "mov.u64 %rd1, 0;"),
        (
            "do not wait in mbarrier.try_wait 1",
            "{ .reg .pred done; again: setp.eq.u32 done, 0, 0; @!done bra again; }",
        ),
        ("for the CTA alone fence.acq_rel 1", "fence.acq_rel.cta;"),
        ("relax atom.global 1", "atom.global.gpu.relaxed.add.u32 %r1, [%rd2], 1;"),
    ],
)
def test_a_mutant_is_still_ptx(name: str, line: str) -> None:
    (mutant,) = [mutant for mutant in mutants(PTX) if mutant.name == name]
    assert mutant.text.splitlines()[mutant.line - 1].strip() == line
