"""flash_attention_varlen: options, neighbours, and the lengths of its inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_kernels import META, refuses

from rooflab.kernels.flash_attention_varlen import library, naive, online
from rooflab.reference.flash_attention_varlen import SPEC, reference
from rooflab.reference.spec import SCHEMES, Case

EVERY = [naive.naive, library.library, online.online]
NAMES = ["naive", "library", "online"]
OURS = pytest.mark.parametrize("kernel", [EVERY[0], EVERY[2]], ids=["naive", "online"])
ALL = pytest.mark.parametrize("kernel", EVERY, ids=NAMES)
SMALL = {"config": online.Config(16, 16, 4, 1)}


def given(queries: list[int], keys: list[int], D: int = 16, H: int = 4, H_kv: int = 2, **more: Any) -> dict[str, Any]:
    """Sequences of these lengths, in fp32."""
    torch.manual_seed(0)
    bounds = [torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32) for counts in (queries, keys)]
    q, k, v = torch.randn(sum(queries), H, D), torch.randn(sum(keys), H_kv, D), torch.randn(sum(keys), H_kv, D)
    longest = {"max_seqlen_q": max(queries, default=0), "max_seqlen_k": max(keys, default=0)}
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1], **longest, **more}


def run(kernel: Any, inputs: dict[str, Any]) -> Any:
    return kernel(**inputs, **(SMALL if kernel is EVERY[2] else {}))


SINKS = torch.tensor([-2.0, 0.0, 3.0, 30.0])


@OURS
@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 16}, {"window": 1000}, {"window": 9, "softcap": 2.0, "sinks": SINKS}], ids=str
)
def test_options_and_the_log_sum_exp(kernel: Any, options: dict[str, Any]) -> None:
    inputs = given([18, 5, 20, 3], [18, 21, 7, 0], causal=True, return_lse=True, **options)
    found, wanted = run(kernel, inputs), reference(**inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@ALL
def test_neighbours_are_not_heard(kernel: Any) -> None:
    inputs = given([20, 7], [20, 7], causal=True)
    plain = run(kernel, inputs)
    inputs["v"][20:] = math.nan
    torch.testing.assert_close(run(kernel, inputs)[:20], plain[:20])


@pytest.mark.parametrize("call", [*EVERY, reference], ids=[*NAMES, "reference"])
def test_offsets_and_lengths_that_leave_a_row_out_are_refused_by_name(call: Any) -> None:
    offsets = [("q", [0, 9, 8]), ("q", [0, 5, 5]), ("k", [0, 5, 9]), ("k", [0, 6, 7]), ("k", [1, 5, 8])]
    changes: list[tuple[dict[str, Any], str]] = [
        ({f"cu_seqlens_{name}": torch.tensor(bounds, dtype=torch.int32)}, f"cu_seqlens_{name}: expected offsets from 0")
        for name, bounds in offsets
    ]
    changes += [({"max_seqlen_q": 4}, "max_seqlen_q: expected at least 5"), ({"max_seqlen_k": -1}, "max_seqlen_k: ")]
    refuses(call, lambda: given([5, 3], [5, 3]), changes)


def test_lengths_of_the_inputs_cover_what_can_go_wrong() -> None:
    case = Case.parse("B=5,T=65,S=70,H=3,H_kv=1,D=64,causal=true")
    for seed in range(4):
        inputs = SPEC.make_inputs(case, SCHEMES["fp32"], META, seed)
        queries, keys = (inputs[name].diff() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        assert (queries[0], queries[-1]) == (65, 0) and keys[2] == 0 and (queries[1:-1] >= 1).all()
        assert inputs["max_seqlen_q"] == queries.max() and inputs["max_seqlen_k"] == keys.max()
        assert len(queries.unique()) > 2
