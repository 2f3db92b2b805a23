"""Each rung's compiled code differs from the rung below in the respect that its op's ladder claims.

A rung of our own code is compiled for Hopper at the most work of llama3_8b.  Where it, or the one below it, is made of
torch calls, those are compared: on a GPU every call that is no view is a launch or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.code.cases import select
from rooflab.bench.code.flow import Loop, hot_loop
from rooflab.bench.code.sass import parse
from rooflab.bench.static import CompiledInfo, CompileFailure, Request, compile_kernels
from rooflab.kernels.registry import Kernel, get_kernel, kernels, ops
from rooflab.reference.spec import SCHEMES, Case

NOT_COMPARED = {
    "gemm/packed": "the weight's layout is oneDNN's own, which nothing shows; `rooflab bench gemm` shows what it saves",
}
"""Rungs whose difference neither code nor calls show, and why."""
Claim = Callable[[], None]
CLAIMS: dict[str, Claim] = {}


def rung(name: str) -> Callable[[Claim], Claim]:
    """The decorated function holds the rung `name` to what its docstring says."""

    def add(claim: Claim) -> Claim:
        CLAIMS[name] = claim
        return claim

    return add


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


def code(op: str, name: str, scheme: str = "bf16", case: str | None = None) -> CompiledInfo:
    """The one kernel that `op`/`name` launches: at the most work of llama3_8b, or at `case`."""
    if scheme == "bf16" and case is None:  # all of them at once, on all cores
        chosen = select(None, (), ("llama3_8b",), (), ("bf16",))
    else:
        chosen = select(op, (name,), ("llama3_8b",), (case,) if case else (), (scheme,))
    requests = [Request(item.kernel.op, item.kernel.name, item.case, item.scheme) for item in chosen]
    found = dict(zip([(r.op, r.kernel, r.scheme.name) for r in requests], compile_kernels(requests), strict=True))
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


@rung("embedding/vectorized")
def embedding_vectorized() -> None:
    """16 bytes a thread at a time, where naive moves an element, and four rows in flight."""
    naive, info = code("embedding", "naive"), code("embedding", "vectorized")
    assert "LDG.E.U16" in str(naive.opcodes) and "STG.E.U16" in naive.opcodes
    assert info.opcodes["STG.E.128"] == 4 and not any(".U16" in opcode for opcode in info.opcodes)
    assert bytes_in_flight(info) >= 4 * 16 >= 8 * bytes_in_flight(naive)


def bytes_in_flight(info: CompiledInfo) -> int:
    """Bytes that a thread has asked for before it first waits for one to store, in the hot loop where there is one."""
    found = hot_loop(info.loops)
    total = 0
    for instruction in found.instructions if found else parse(info.sass)[info.name].instructions:
        if instruction.family == "global_store":
            return total
        total += instruction.width_bytes if instruction.family == "global_load" else 0
    raise AssertionError(f"{info.name} stores nothing")


@rung("flash_attention/online")
def flash_attention_online() -> None:
    """One launch on the tensor cores, and no score leaves the chip: nothing is stored in the loop over the keys."""
    inner = loop(launches_once("flash_attention", "online", 6)).counts
    assert inner["wgmma"] > 0 and inner["cp_async"] > 0 and inner["global_store"] == 0


@rung("fused_add_rmsnorm/fused")
def fused_add_rmsnorm_fused() -> None:
    """One launch; a thread reads x, residual and weight once and writes the sum and its norm, from registers."""
    info = launches_once("fused_add_rmsnorm", "fused", 7)
    assert (info.counts["global_load"], info.counts["global_store"], len(info.loops)) == (3, 2, 0)


@rung("gemm/tensor_core")
def gemm_tensor_core() -> None:
    """Products move from FMAs to wgmma, fed by cp.async; in fp32 they stay FMAs, with far fewer loads for each."""
    naive, info = loop(code("gemm", "naive")).counts, loop(code("gemm", "tensor_core")).counts
    assert naive["fma"] > 0 and naive["wgmma"] == naive["mma"] == naive["cp_async"] == 0
    assert info["wgmma"] > 0 and info["cp_async"] > 0 and info["fma"] == 0 and info["global_load"] == 0
    naive32, full = loop(code("gemm", "naive", "fp32")), code("gemm", "tensor_core", "fp32")
    assert not full.uses_tensor_cores and not full.uses_tf32
    reuse = loop(full).counts["fma"] / loop(full).global_loads
    assert reuse >= 10 * naive32.counts["fma"] / naive32.global_loads


@rung("kv_cache_write/fused")
def kv_cache_write_fused() -> None:
    """One launch for both caches, 16 bytes at a time; where naive selects by a mask, and on a GPU waits to know how
    many tokens are left, the launcher never reads a slot: it was compiled with slots that have no values."""
    info = launches_once("kv_cache_write", "fused", 6)
    assert info.opcodes["STG.E.128"] == info.counts["global_store"] == 2
    slots = torch.empty(4, dtype=torch.int64, device="meta")
    caches = torch.empty(2, 8, 1, 16, device="meta")
    rows = torch.empty(4, 1, 16, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        get_kernel("kv_cache_write", "naive")(k=rows, v=rows, k_cache=caches, v_cache=caches, slot_mapping=slots)


@rung("kv_cache_write/index_copy")
def kv_cache_write_index_copy() -> None:
    """No mask and no selection where every token has a slot: the least slot, then one copy a cache."""
    every = ops()["kv_cache_write"].cases["smoke"][0].but(skipped=0)
    assert dict(calls("kv_cache_write", "index_copy", every).names) == {"min": 1, "index_copy_": 2}
    assert calls("kv_cache_write", "naive", every).names.total() >= 6


@rung("paged_attention/gqa_packed")
def paged_attention_gqa_packed() -> None:
    """One launch whatever the batch, where naive's calls grow with it; a program a KV head, not a query head, on the
    tensor cores, and nothing is stored in the loop over the keys."""
    cases = sorted(ops()["paged_attention"].cases["smoke"], key=lambda case: int(case["B"]))
    few, many = (calls("paged_attention", "naive", case).names.total() for case in (cases[0], cases[-1]))
    assert cases[0]["B"] < cases[-1]["B"] and few < many
    (item,) = select("paged_attention", ("gqa_packed",), ("llama3_8b",), (), ("bf16",))
    info = launches_once("paged_attention", "gqa_packed", 15)
    assert info.grid == (item.case["B"], item.case["H_kv"]) and item.case["H_kv"] < item.case["H"]
    inner = loop(info).counts
    assert inner["mma"] > 0 and inner["cp_async"] > 0 and inner["global_store"] == 0


@rung("rmsnorm/fused")
def rmsnorm_fused() -> None:
    """One launch, and x is read once: a thread loads x and weight and stores y, with no loop."""
    info = launches_once("rmsnorm", "fused", 6)
    assert (info.counts["global_load"], info.counts["global_store"], len(info.loops)) == (2, 1, 0)


@rung("rope/joined")
def rope_joined() -> None:
    """Each step is one call for q and k together."""
    naive, joined = (calls("rope", name).names for name in ("naive", "joined"))
    assert joined.total() < naive.total() and joined["cat"] + joined["stack"] >= 2 and joined["index"] == 2


@rung("rope/fused")
def rope_fused() -> None:
    """One launch instead of naive's and joined's steps; half-split pairs as vectors of 16 bytes, interleaved ones a
    value at a time."""
    assert calls("rope", "joined").names.total() > 5
    info = launches_once("rope", "fused", 18)
    assert info.opcodes["STG.E.128"] == info.counts["global_store"] == 4, "two halves of q, and of k"
    (item,) = select("rope", ("fused",), ("llama3_8b",), (), ("bf16",))
    interleaved = code("rope", "fused", "bf16", item.case.but(interleaved=True).id)
    assert interleaved.opcodes["STG.E.U16"] == interleaved.counts["global_store"]


@rung("sample/bisect")
def sample_bisect() -> None:
    """One launch, and no sort: no row is written back, for the token is the only thing stored, once, in no loop."""
    assert calls("sample", "naive").sorted_elements > 0
    info = launches_once("sample", "bisect", 10)
    assert info.opcodes["STG.E.64"] == info.counts["global_store"] == 1
    assert len(info.loops) > 1 and not any(found.counts["global_store"] for found in info.loops)


@rung("sample/prefilter")
def sample_prefilter() -> None:
    """A threshold leaves few tokens to sort, where naive sorts every row whole."""
    cases = [case for case in ops()["sample"].cases["smoke"] if 0 < case["top_k"] < case["V"] // 4]
    naive, filtered = (calls("sample", name, cases[0]).sorted_elements for name in ("naive", "prefilter"))
    assert naive == cases[0]["B"] * cases[0]["V"] and filtered < naive / 2


@rung("silu_and_mul/fused")
def silu_and_mul_fused() -> None:
    """One launch: gate and up are read once and one result is written; only that one is rounded, two values an
    instruction."""
    info = launches_once("silu_and_mul", "fused", 3)
    assert (info.opcodes["LDG.E.128"], info.opcodes["STG.E.128"]) == (2, 1)
    assert (info.counts["global_load"], info.counts["global_store"]) == (2, 1)
    rounded = sum(number for opcode, number in info.opcodes.items() if opcode.startswith("F2F"))
    assert rounded == 16 // 2 // 2, "8 results of 2 bytes in a store"
