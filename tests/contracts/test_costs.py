"""The bytes of every op and kernel: at least the op's least bytes, and at most naive's for a rung; numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import META

from rooflab.kernels.registry import get_kernel, kernels, ops
from rooflab.reference.spec import SCHEMES, Case, Inputs

LESS = ("gemm_grouped/naive",)
"""Its host reads the offsets, which no launch does."""
MORE = ("gemm/one_thread", "gemm_grouped/grouped", "gemm_grouped/tma", "gemm_grouped/cooperative", "rope/joined")
"""Rungs that move more than naive does: fewer rows share a weight, or q and k are copied into one tensor."""
PARTIAL_SUMS = 1.1
"""What rungs that cut K may add."""


def made(op: str, case: str | Case, scheme: str, **changes: Any) -> Inputs:
    case = ops()[op].check_case(Case.parse(case) if isinstance(case, str) else case)
    return {**ops()[op].make_inputs(case, SCHEMES[scheme], META, 0), **changes}


@pytest.mark.parametrize("op", ops())
def test_no_kernel_moves_less_than_the_op_must(op: str) -> None:
    """Each case in the next scheme: what a kernel reads and writes is at least what the cost reads and writes."""
    spec, told = ops()[op], 0
    for number, case in enumerate((*spec.cases["smoke"], *spec.cases["edge"])):
        inputs = made(op, case, spec.schemes[number % len(spec.schemes)])
        least = spec.cost_of(inputs)
        for kernel in kernels(op).values():
            assert kernel.traffic is not None, kernel.id
            said = kernel.traffic_of(inputs) if kernel.why_not_args(inputs) is None else None
            if said is None or not least.write_bytes or kernel.id in LESS:
                continue
            told += 1
            reads, writes = said.read_bytes >= least.read_bytes, said.write_bytes >= least.write_bytes
            assert reads and writes and said.launches >= 1, (kernel.id, case.id)
    assert told


@pytest.mark.parametrize("op", [op for op, spec in ops().items() if "bf16" in spec.schemes])
def test_no_rung_moves_more_than_naive_at_the_sizes_of_a_model(op: str) -> None:
    """What naive moves is counted, call by call, or is a rung of its own."""
    cases = ops()[op].cases["llama3_8b"]
    for inputs in (made(op, case, "bf16") for case in (cases[0], cases[-1])):
        naive = get_kernel(op, "naive").traffic_of(inputs)
        for kernel in kernels(op).values():
            if kernel.role == "optimized" and kernel.id not in MORE and kernel.why_not_args(inputs) is None:
                said = kernel.traffic_of(inputs)
                assert said is None or said.bytes <= PARTIAL_SUMS * naive.bytes, kernel.id


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


PAGES = {"block_table": ints([4, 1], [4, 2], [-1, -1]), "seq_lens": ints(4, 3, 0)}
FLASH = "H=4,H_kv=2,D=64,causal=true"
FP8 = "B=1,T=2048,S=2048,H=16,H_kv=4,D=128,causal=false"
GROUPED = "T=2,top_k=2,E=8,N=28672,K=4096,skew=0.0"
ROWS = 4 * (4000 + 32)
"""Four rows of 1000 logits and their settings."""
COSTS: list[tuple[str, str, str, dict[str, torch.Tensor], float, float, float, float]] = [
    # A row of a table, a page and a position that is asked for twice is read once.
    ("embedding", "T=4,V=100,H=64", "bf16", {"token_ids": ints(7, 7, 7, 9, dtype=torch.int64)},
     4 * 8 + 2 * 64 * 2, 4 * 64 * 2, 0, 0),
    ("rope", "T=4,H=8,H_kv=2,D=64,max_position=100,interleaved=false", "bf16",
     {"positions": ints(5, 5, 5, 6, dtype=torch.int64)}, 2 * 2560 + 4 * 8 + 2 * (2 * 32 * 4), 2 * 2560, 0, 0),
    ("paged_attention", "B=3,context=4,H=1,H_kv=1,D=64,block_size=2,ragged=false", "fp32", PAGES,
     2 * 64 * 4 + 5 * 2 * 64 * 4 + 4 * 4 + 3 * 4, 3 * 64 * 4, 4 * 64 * 7, 7),
    ("kv_cache_write", "T=4,H_kv=2,D=8,num_blocks=2,block_size=4,skipped=1", "bf16", {}, 4 * 8 + 192, 192, 0, 0),
    # Pairs that are seen; of queries that see none neither the pair nor the query.
    ("flash_attention", f"B=2,T=2,S=3,{FLASH}", "fp32", {}, 4 * 64 * 40, 4 * 64 * 16, 4 * 64 * 40, 40),
    ("flash_attention", "B=1,T=5,S=2,H=1,H_kv=1,D=64,causal=true", "fp32", {}, 4 * 64 * 6, 4 * 64 * 5, 4 * 64 * 3, 3),
    ("flash_attention", FP8, "fp8_e4m3", {}, 2048 * 128 * 24 + 4 * 24, 2 * 2048 * 128 * 16,
     4 * 128 * 16 * 2048 * 2048, 16 * 2048 * 2048),
    # Of experts those that have rows; a bias is added outside of the product; a gate takes exp and a division.
    ("gemm_grouped", GROUPED, "bf16", {}, 2 * (2 * 4096 + 2 * 28672 * 4096) + 4 * 9, 2 * 2 * 28672,
     2 * 2 * 28672 * 4096, 0),
    ("gemm_fp8", "M=4096,N=1024,K=512,scales=block,bias=true", "fp8_e4m3", {},
     4096 * 512 + 512 * 1024 + 4 * (4096 * 4 + 4 * 8) + 2 * 1024, 2 * 4096 * 1024, 2 * 4096 * 1024 * 512, 0),
    ("gemm_silu_and_mul", "M=64,I=48,K=32,layout=NT", "bf16", {}, 2 * 32 * (64 + 96), 2 * 64 * 48,
     4 * 64 * 48 * 32, 2 * 64 * 48),
    ("rmsnorm", "T=3,H=64,eps=1e-06", "out_int8", {}, 2 * (3 * 64 + 64), 3 * 64 + 4 * 3, 0, 3),
    # A greedy row draws nothing, a row with top_k draws of k tokens.
    ("sample", "B=4,V=1000,temperature=0.0,top_k=0,top_p=1.0,min_p=0.0", "fp32", {}, ROWS, 32, 0, 0),
    ("sample", "B=4,V=1000,temperature=1.0,top_k=0,top_p=1.0,min_p=0.0", "fp32", {}, ROWS, 32, 0, 4 * 2000),
    ("sample", "B=4,V=1000,temperature=1.0,top_k=50,top_p=0.9,min_p=0.0", "fp32", {}, ROWS, 32, 0, 4 * 52),
]  # fmt: skip
LARGE = "M=2048,N=4096,K=4096,layout=NT,bias=false"
WEIGHT, GATED = 2 * 4096 * 4096, 2 * 2048 * 14336
MOVES: list[tuple[str, str, str, str, float, int]] = [
    ("gemm", LARGE, "bf16", "naive", (2048 / 16 - 1) * WEIGHT, 1),
    ("gemm", LARGE, "bf16", "tensor_core", (2048 / 1024 - 1) * WEIGHT, 1),
    ("gemm", LARGE, "bf16", "tma", 0, 1),
    ("gemm_fp8", "M=4096,N=1024,K=512,scales=block,bias=true", "fp8_e4m3", "promoted", 3 * 512 * 1024, 1),
    ("gemm_silu_and_mul", "M=2048,I=14336,K=4096,layout=NT", "bf16", "library", 6 * GATED, 3),
    ("gemm_w4a16", "M=1,N=8192,K=8192,zeros=false,bias=false", "w4a16_g128", "gemv", 0, 1),
    ("gemm_w8a16", "M=64,N=64,K=64,bias=false", "w8a16", "packed", 0, 1),
    ("gemm_grouped", GROUPED, "bf16", "naive", 2 * 2 * 2 * 28672 - 4 * 9, 4),
    ("flash_attention", FP8, "fp8_e4m3", "library", 8 * 2048 * 128 * 24, 7),
]
"""Bytes beyond the least, and launches, of kernels that state them or whose calls are counted."""


@pytest.mark.parametrize(("op", "case", "scheme", "changes", "read", "written", "flops", "sfu"), COSTS)
def test_costs_by_hand(op, case, scheme, changes, read, written, flops, sfu):
    cost = ops()[op].cost_of(made(op, case, scheme, **changes))
    assert (cost.read_bytes, cost.write_bytes) == (read, written)
    assert (sum(cost.tensor_flops.values()), cost.sfu_ops) == (flops, sfu)


@pytest.mark.parametrize(("op", "case", "scheme", "name", "beyond", "launches"), MOVES)
def test_traffic_by_hand(op, case, scheme, name, beyond, launches):
    inputs = made(op, case, scheme)
    said = get_kernel(op, name).traffic_of(inputs)
    assert (said.bytes - ops()[op].cost_of(inputs).bytes, said.launches) == (beyond, launches)
