"""The ladders of the ops beside gemm: what each rung's compiled code or calls show over the rung below."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rung_claims import bytes_in_flight, calls, code, launches_once, loop, rung

from rooflab.bench.compile.cases import Query
from rooflab.bench.compile.static import CompiledInfo
from rooflab.kernels.lib.merge import PARTS_AT_ONCE
from rooflab.kernels.registry import get_kernel, ops


@rung("embedding/vectorized")
def embedding_vectorized() -> None:
    """16 bytes a thread at a time, where naive moves an element, and four rows in flight."""
    naive, info = code("embedding", "naive"), code("embedding", "vectorized")
    assert "LDG.E.U16" in str(naive.opcodes) and "STG.E.U16" in naive.opcodes
    assert info.opcodes["STG.E.128"] == 4 and not any(".U16" in opcode for opcode in info.opcodes)
    assert bytes_in_flight(info) >= 4 * 16 >= 8 * bytes_in_flight(naive)


@rung("flash_attention/online")
def flash_attention_online() -> None:
    """One launch on the tensor cores, and no score leaves the chip: nothing is stored in the loop over the keys."""
    inner = loop(launches_once("flash_attention", "online", 6)).counts
    assert inner["wgmma"] > 0 and inner["cp_async"] > 0 and inner["global_store"] == 0


@rung("flash_attention_varlen/online")
def flash_attention_varlen_online() -> None:
    """One launch whatever the batch, where naive's calls grow with it, on the tensor cores; nothing is stored in the
    loops over the keys, of which one selects by no mask."""
    info = launches_once("flash_attention_varlen", "online", 20)
    assert len(info.loops) == 2
    for body in info.loops:
        assert body.counts["wgmma"] > 0 and body.counts["cp_async"] > 0 and body.counts["global_store"] == 0
    plain, masked = sorted(sum("FSEL" in entry.opcode for entry in body.instructions) for body in info.loops)
    assert plain <= 2 < 32 <= masked


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


@rung("merge_attention_states/fused")
def merge_attention_states_fused() -> None:
    """One launch, however many parts: the loop over them asks for four outputs at once, 16 bytes a lane, and stores
    nothing."""
    inner = loop(launches_once("merge_attention_states", "fused", 8))
    wide = sum(item.opcode.startswith("LDG.E.128") for item in inner.instructions)
    assert wide == PARTS_AT_ONCE and inner.counts["global_store"] == 0


@rung("mla_decode/split_kv")
def mla_decode_split_kv() -> None:
    """On the tensor cores, with a latent loaded once: the loop copies to shared memory what both products read, and
    loads nothing else but the table's entry for each of its copies."""
    inner = loop(code("mla_decode", "split_kv")).counts
    assert inner["wgmma"] + inner["mma"] > 0 and inner["cp_async"] > 0 and inner["global_store"] == 0
    assert inner["global_load"] <= inner["cp_async"]


@rung("paged_attention/gqa_packed")
def paged_attention_gqa_packed() -> None:
    """One launch whatever the batch, where naive's calls grow with it; a program a KV head, not a query head, on the
    tensor cores, and nothing is stored in the loop over the keys."""
    cases = sorted(ops()["paged_attention"].cases["smoke"], key=lambda case: int(case["B"]))
    few, many = (calls("paged_attention", "naive", case).names.total() for case in (cases[0], cases[-1]))
    assert cases[0]["B"] < cases[-1]["B"] and few < many
    (item,) = Query("paged_attention", ("gqa_packed",), ("llama3_8b",), (), ("bf16",)).select()
    info = launches_once("paged_attention", "gqa_packed", 15)
    assert info.grid == (item.case["B"], item.case["H_kv"]) and item.case["H_kv"] < item.case["H"]
    inner = loop(info).counts
    assert inner["mma"] > 0 and inner["cp_async"] > 0 and inner["global_store"] == 0


def reads_rows_once(op: str, steps: int, loads: int, stores: int) -> CompiledInfo:
    """One launch for naive's `steps` or more: a thread has `loads` and `stores` of 16 bytes, in no loop."""
    info = launches_once(op, "fused", steps)
    assert (info.opcodes["LDG.E.128"], info.opcodes["STG.E.128"], len(info.loops)) == (loads, stores, 0)
    assert (info.counts["global_load"], info.counts["global_store"]) == (loads, stores)
    return info


rung("rmsnorm/fused")(partial(reads_rows_once, "rmsnorm", 8, 4, 2))  # x and weight
rung("fused_add_rmsnorm/fused")(partial(reads_rows_once, "fused_add_rmsnorm", 9, 6, 4))  # the sum as well as its norm
rung("softmax/fused")(partial(reads_rows_once, "softmax", 5, 2, 2))


@rung("layernorm/fused")
def layernorm_fused() -> None:
    """One launch, and x is read once, in no loop; a barrier more than rmsnorm's, for the mean."""
    info = reads_rows_once("layernorm", 11, 6, 2)
    assert info.counts["barrier"] > code("rmsnorm", "fused").counts["barrier"]


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
    (item,) = Query("rope", ("fused",), ("llama3_8b",), (), ("bf16",)).select()
    interleaved = code("rope", "fused", "bf16", item.case.but(interleaved=True).id)
    assert interleaved.opcodes["STG.E.U16"] == interleaved.counts["global_store"]


def reads_gate_and_up_once(op: str, steps: int) -> None:
    """One launch: gate and up are read once and one result is written; only that one is rounded, two values an
    instruction."""
    info = reads_rows_once(op, steps, 2, 1)
    rounded = sum(number for opcode, number in info.opcodes.items() if opcode.startswith("F2F"))
    assert rounded == 16 // 2 // 2, "8 results of 2 bytes in a store"


rung("silu_and_mul/fused")(partial(reads_gate_and_up_once, "silu_and_mul", 5))
rung("gelu_and_mul/fused")(partial(reads_gate_and_up_once, "gelu_and_mul", 11))


@rung("rope_and_cache/fused")
def rope_and_cache_fused() -> None:
    """One launch, 16 bytes at a time where a thread has them; nothing waits in shared memory, interleaved or not."""
    info = launches_once("rope_and_cache", "fused", 25)
    assert info.opcodes["STG.E.128"] > 0 and info.counts["shared_load"] == info.counts["barrier"] == 0
