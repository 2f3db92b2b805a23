"""What the claims about rungs are made with: compiled code at the most work of llama3_8b, and torch's calls counted.

A file `tests/rungs_*.py` holds claims, each under the name of its rung; `tests/test_compile.py` runs them all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.compile.cases import Query
from rooflab.bench.compile.flow import Loop, hot_loop
from rooflab.bench.compile.sass import parse
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, compile_kernels
from rooflab.kernels.registry import get_kernel, ops
from rooflab.reference.spec import SCHEMES, Case

Claim = Callable[[], object]
CLAIMS: dict[str, Claim] = {}
SLOW: set[str] = set()


def rung(name: str, slow: bool = False) -> Callable[[Claim], Claim]:
    """The decorated function holds the rung `name` to what its docstring says; a `slow` one, which compiles several
    configs or cases of its own, does so in `make test-full` alone."""

    def add(claim: Claim) -> Claim:
        CLAIMS[name] = claim
        if slow:
            SLOW.add(name)
        return claim

    return add


def code(op: str, name: str, scheme: str = "bf16", case: str | None = None) -> CompiledInfo:
    """The one kernel that `op`/`name` launches: at the most work of llama3_8b, or at `case`."""
    together = scheme == "bf16" and case is None  # those of the op at once, on all cores
    chosen = Query(op, () if together else (name,), ("llama3_8b",), (case,) if case else (), (scheme,)).select()
    found = dict(zip([(r.op, r.kernel, r.scheme.name) for r in chosen], compile_kernels(chosen), strict=True))
    result = found[op, name, scheme]
    assert not isinstance(result, CompileFailure), result
    assert len(result) == 1 and result[0].launches == 1, f"{op}/{name} launches {len(result)} kernels"
    return result[0]


def loop(info: CompiledInfo) -> Loop:
    """Its hot loop, which it must have."""
    found = hot_loop(info.loops)
    assert found is not None, f"{info.name} has no loop"
    return found


class Calls(TorchDispatchMode):
    """Counts the torch operators that compute: views, allocations and reading a shape are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.sorted_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and not name.startswith(("empty", "new_empty", "detach", "lift_fresh", "_local_scalar")):
            self.names[name] += 1
        if name == "sort":
            self.sorted_elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def calls(op: str, name: str, case: Case | None = None) -> Calls:
    """What `op`/`name` calls in bf16 on the CPU, at the last smoke case or at `case`."""
    spec = ops()[op]
    inputs = spec.make_inputs(case or spec.cases["smoke"][-1], SCHEMES["bf16"], torch.device("cpu"), 0)
    kernel = get_kernel(op, name)
    with Calls() as found:
        kernel(**inputs)
    return found


def launches_once(op: str, name: str, least: int) -> CompiledInfo:
    """The only kernel of a rung over torch steps, of which there are at least `least`."""
    steps = calls(op, "naive").names.total()
    assert steps >= least, f"{op}/naive: {steps} calls"
    return code(op, name)


def bytes_in_flight(info: CompiledInfo) -> int:
    """Bytes that a thread has asked for before it first waits for one to store, in the hot loop where there is one."""
    found = hot_loop(info.loops)
    total = 0
    for instruction in found.instructions if found else parse(info.sass)[info.name].instructions:
        if instruction.family == "global_store":
            return total
        total += instruction.width_bytes if instruction.family == "global_load" else 0
    raise AssertionError(f"{info.name} stores nothing")


def new_sums(info: CompiledInfo, left: str = "") -> tuple[int, int]:
    """wgmma in fp8 that begin a sum, and all of them; `left` is a pattern of a left operand out of registers."""
    found = re.findall(rf"QGMMA\.\S+ R\d+, {left}gdesc\[UR\d+\], (\w+)", info.sass)
    return found.count("RZ"), len(found)


def fetched_by_tma(below: CompiledInfo, info: CompiledInfo) -> None:
    """Two instructions fetch what took every thread eight, and wgmma takes the tiles as they lie."""
    before, counts = loop(below).counts, loop(info).counts
    assert before["tma"] == 0 and before["cp_async"] >= 8
    assert counts["tma"] == 2 and counts["wgmma"] == before["wgmma"] > 0 and counts["cp_async"] == 0
    assert counts["shared_load"] == counts["shared_store"] == info.stack_bytes == 0


def one_loop_on_all_sms(below: CompiledInfo, info: CompiledInfo, stores: int) -> None:
    """As many CTAs as SMs; one loop holds loads, products and the stores of the result, which are TMA's as well."""
    assert below.grid[0] > 132 == info.grid[0] and info.stack_bytes == 0
    assert len([found for found in info.loops if not found.waits]) == 1, "both loops are one"
    assert loop(info).counts["wgmma"] > 0 and loop(info).counts["tma"] == loop(below).counts["tma"] + stores


def specialized(below: CompiledInfo, info: CompiledInfo) -> None:
    """A warp or a warpgroup loads and two warpgroups multiply; registers move between them."""
    assert not below.uses_warp_specialization and info.uses_warp_specialization
    assert info.threads == 384 and "setmaxnreg" in info.ptx and info.stack_bytes == 0
    counts = loop(info).counts
    assert counts["wgmma"] > 0 and counts["tma"] == counts["shared_load"] == counts["shared_store"] == 0
