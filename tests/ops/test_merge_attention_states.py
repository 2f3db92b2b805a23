"""merge_attention_states: merged parts of attention, parts without keys, and any number of parts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from op_kernels import CPU, assert_right

from rooflab.kernels.merge_attention_states import fused, naive
from rooflab.reference.attention import Scores, attend, seen_keys
from rooflab.reference.merge_attention_states import SPEC, reference
from rooflab.reference.spec import SCHEMES, Case

KERNELS = [naive.naive, fused.fused]


@pytest.mark.parametrize("cuts", [(0, 5, 40), (0, 1, 2, 40), (0, 0, 39, 40), (0, 20, 20, 40, 40)])
def test_parts_of_the_keys_give_what_all_of_them_give(cuts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    whole = attend(q, k, v, seen_keys(3, 40, False), Scores(0.25))
    parts = [attend(q, k[a:b], v[a:b], seen_keys(3, b - a, False), Scores(0.25)) for a, b in itertools.pairwise(cuts)]
    merged = reference(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("merge", [reference, *KERNELS], ids=["reference", "naive", "fused"])
@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_a_part_that_saw_no_key_counts_for_nothing_whatever_it_holds(merge, empty) -> None:
    outs, lses = torch.randn(3, 2, 2, 16), torch.zeros(3, 2, 2)
    for poison in (math.nan, math.inf):
        outs[1] = poison
        lses[1] = empty
        lses[:, 1, 1] = empty
        out, lse = (result.float() for result in merge(outs, lses))
        assert out.isfinite().all() and not out[1, 1].any() and lse[1, 1] == -math.inf
        torch.testing.assert_close(out[0], outs[[0, 2], 0].mean(0))
        torch.testing.assert_close(lse[0], torch.full((2,), math.log(2)))
        assert torch.equal(merge(outs[..., :0], lses)[1].float(), lse)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("parts", [1, 2, 4, 5, 9])
@pytest.mark.parametrize(("scheme", "D"), [("fp32", 16), ("fp16", 80), ("fp32", 512), ("fp16", 2048)])
def test_any_number_of_parts_and_of_rows_for_a_program(parts: int, scheme: str, D: int) -> None:
    case = Case.parse(f"P={parts},T=5,H=7,D={D},empty=true")
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], CPU, parts)
    assert_right(SPEC, fused.fused(**inputs), inputs, SCHEMES[scheme])
