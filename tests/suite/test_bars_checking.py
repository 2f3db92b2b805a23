"""A bar's entry on a card is there to time: checks take at most a quarter of what the plan gives it.

The work of a check is counted on a CPU, in a GPU's pieces, on two cases of moderate size: operations, their FLOPs and
bytes, for the first kernel of a case, which makes the oracle and the limits, and for a later one.  What the two cases
differ by grows to the bar's case as the op's own work does.  The time follows from an H100's rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bars.bar import Bar
from bars.judge import EVERY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.check_runs import KEPT
from rooflab.kernels import registry
from rooflab.reference import attention, compare
from rooflab.reference.spec import Case, Scheme, get_scheme

HBM_BYTES_PER_S, FP64_FLOPS_PER_S = 0.8 * 3.35e12, 0.7 * 67e12
"""An H100 SXM's rates (data sheet), and the share of them that torch's own operations are taken to reach."""
OPERATION_S = 10e-6
"""Of the host, for an operation of torch."""
RUNS = 8 / 6
"""A GPU makes 8 judged runs of a kernel where a CPU makes 6."""
CASES = {
    # Not causal: a GPU's pieces of the oracle are thin enough to leave out what a causal query does not see.
    "flash_attention": tuple(f"B=1,T={T},S={T},H=1,H_kv=1,D=64,causal=false" for T in (512, 1024)),
    "paged_attention": tuple(f"B={B},context=512,H=32,H_kv=8,D=64,block_size=16,ragged=false" for B in (2, 4)),
    "rope_and_cache": tuple(
        f"T={T},H=8,H_kv=4,D=64,rotary=64,max_position=512,num_blocks={T // 8},"
        "block_size=16,skipped=0,interleaved=false"
        for T in (64, 256)
    ),
    "gemm": tuple(f"M={n},N={n},K={n},layout=NT,bias=false" for n in (128, 256)),
    "gemm_fp8": tuple(f"M={n},N={n},K={n},scales=tensor,bias=false" for n in (64, 128)),
    "gemm_w4a16": tuple(f"M=1,N={n},K={n},zeros=false,bias=false" for n in (256, 512)),
    "gemm_w8a16": tuple(f"M=1,N={n},K={n},bias=false" for n in (256, 512)),
    "gemm_silu_and_mul": tuple(f"M={n},I={n},K={n},layout=NT" for n in (128, 256)),
    "rmsnorm": tuple(f"T={T},H=1024,eps=1e-05" for T in (64, 256)),
    "fused_add_rmsnorm": tuple(f"T={T},H=1024,eps=1e-05" for T in (64, 256)),
    "silu_and_mul": tuple(f"T={T},I=1024" for T in (64, 256)),
    "sample": tuple(f"B={B},V=16384,temperature=1.0,top_k=50,top_p=0.95,min_p=0.0,sigma=2.5" for B in (4, 8)),
}
AS_ON_CUDA = patch.object(attention, "HELD_ELSEWHERE", attention.HELD_SCORES["cuda"])
BARS = [bar for bar in EVERY.values() if "op" in bar.arguments]


@dataclass
class Work(TorchDispatchMode):
    """What operations that make or read tensors do."""

    operations: int = 0
    bytes: float = 0.0
    fp64_flops: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()

    def __sub__(self, other: Work) -> Work:
        return Work(self.operations - other.operations, self.bytes - other.bytes, self.fp64_flops - other.fp64_flops)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, torch.Tensor)]
        if tensors and not op.is_view and op is not torch.ops.aten._unsafe_view.default:
            self.operations += 1
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if op._overloadpacket in flop_registry and tensors[-1].dtype == torch.float64:
                self.fp64_flops += flop_registry[op._overloadpacket](*args, **(kwargs or {}), out_val=made)
        return made


Size = tuple[float, float, float, float]


def size_of(op: str, case: Case, scheme: Scheme) -> Size:
    """By what a check grows: rows, for operations; values moved, and values inside of the op (scores); FLOPs."""
    spec = registry.get_op(op)
    cost = spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0))
    moved = cost.bytes / scheme.activation.itemsize
    rows = math.prod(int(case.get(axis, 1)) for axis in ("B", "H", "T"))
    return rows, moved, moved + cost.sfu_ops, cost.flops


@cache
def counted(op: str, scheme: str) -> list[tuple[Size, Work, Work]]:
    """Of both cases: the size, and the work of checking the first kernel on it, and a later one."""
    spec, given, found = registry.get_op(op), get_scheme(scheme), []
    kernel = registry.get_kernel(op, "library" if "library" in registry.kernels(op) else "naive")
    for text in CASES[op]:
        case = spec.check_case(Case.parse(text))
        KEPT.forget()
        works = []
        for _ in range(2):
            with Work() as work, patch.dict(compare.PIECE, cpu=compare.PIECE["cuda"]), AS_ON_CUDA:
                result = check_kernel(kernel, spec, case, given, torch.device("cpu"), planted=False)
            assert result.status == "OK", result.reason
            works.append(work)
        found.append((size_of(op, case, given), works[0], works[1]))
    return found


def seconds(small: Work, large: Work, rows: float, values: float, flops: float) -> float:
    """Of an H100, where the work has grown by so many times the difference between both."""
    operations = small.operations + rows * (large.operations - small.operations)
    moved = small.bytes + values * (large.bytes - small.bytes)
    computed = small.fp64_flops + flops * (large.fp64_flops - small.fp64_flops)
    return OPERATION_S * operations + moved / HBM_BYTES_PER_S + computed / FP64_FLOPS_PER_S


def check_seconds(entry: Bar) -> Iterator[float]:
    """Of each case of a bar, for all of its kernels."""
    told = entry.arguments
    op, scheme = told["op"], told.get("scheme") or "bf16"
    texts = [
        text for name in ("cases", "least", "pairs") if isinstance(told.get(name), list | dict) for text in told[name]
    ]
    texts += [told[name] for name in ("case", "even", "ragged") if name in told]
    assert texts
    kernels = [kernel for kernel in registry.kernels(op).values() if kernel.role != "naive"]
    rungs = told.get("rungs")
    count = sum(not rungs or kernel.role != "optimized" or kernel.name in rungs for kernel in kernels)
    (small, *works), (large, *more) = counted(op, scheme)
    for text in texts:
        size = size_of(op, registry.get_op(op).check_case(Case.parse(text)), get_scheme(scheme))
        rows, moved, inside, flops = (
            (one - low) / ((high - low) or 1.0) for one, low, high in zip(size, small, large, strict=True)
        )
        own = (works[0] - works[1], more[0] - more[1])
        yield seconds(*own, rows, inside, flops) + RUNS * count * seconds(works[1], more[1], rows, moved, flops)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry", BARS, ids=lambda entry: entry.id)
def test_at_most_a_quarter_of_a_bar_is_checking(entry: Bar) -> None:
    took = sum(check_seconds(entry))
    print(f"{entry.id}: {took:.2f} of {entry.cost_s:.0f} s")
    assert took <= entry.cost_s / 4
