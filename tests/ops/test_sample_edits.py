"""sample: tokens that are edited and masked, and input that is refused."""

import math

import pytest
import torch
from op_kernels import CPU, emulated, is_right, refuses
from test_sample import FP32, INF, rows_of

from rooflab.kernels.registry import get_kernel
from rooflab.kernels.sample.bisect import bisect
from rooflab.kernels.sample.cluster import ClusterConfig
from rooflab.kernels.sample.library import library
from rooflab.kernels.sample.naive import naive
from rooflab.kernels.sample.prefilter import prefilter
from rooflab.reference.sample import SPEC, settings
from rooflab.reference.spec import Case


def cluster(*args, **named):
    """The rung in CUDA C++, emulated."""
    return emulated(get_kernel("sample", "cluster"), *args, **named, config=ClusterConfig(1, 32))[0]


@pytest.mark.parametrize("kernel", [SPEC.reference, naive, prefilter, bisect, cluster])
def test_edits_penalties_and_the_mask_are_those_worked_out_by_hand(kernel):
    """x = logit + bias; / or * 1.5 from a count of 0 on; then less 2 * count + 10 from a count of 1 on."""
    edits = {
        "repetition_penalty": torch.tensor([1.5] * 6),
        "presence_penalty": torch.tensor([10.0] * 6),
        "frequency_penalty": torch.tensor([2.0] * 6),
        "edit_offsets": torch.tensor([0, 1, 2, 3, 4, 5, 5], dtype=torch.int32),
        "edit_ids": torch.tensor([1, 1, 1, 1, 2], dtype=torch.int32),
        "edit_counts": torch.tensor([-1, 0, 0, 1, -1], dtype=torch.int32),
        "edit_bias": torch.tensor([0.0, 0.0, -12.0, 12.1, -INF]),
        "allowed": torch.tensor([[-1]] * 5 + [[0b1000]], dtype=torch.int32),
    }
    logits = torch.tensor([[-9.0, 9.0, 5.9, 0.0]]).repeat(6, 1)
    logits[0, 2] = 9.0
    logits[2] = torch.tensor([-9.0, 9.0, -4.4, -4.5])  # 9 - 12 = -3 becomes -4.5
    logits[3] = torch.tensor([-9.0, 9.0, 2.0, 2.2])  # 21.1 / 1.5 - 12 = 2.07
    logits[4, 1] = 1.0
    found = kernel(logits, **settings([(0.0, 0, 1.0, 0.0)] * 6, CPU, 0), **edits, top_n=2)
    assert found[0].tolist() == [1, 1, 2, 3, 1, 3]
    wanted = logits.double().log_softmax(-1)
    assert found[1].tolist() == [[1, 1, 2], [1, 1, 2], [2, 1, 2], [3, 1, 3], [1, 2, 1], [3, 1, 2]]
    assert torch.allclose(found[2].double(), wanted.gather(1, found[1]), atol=1e-5)


def test_a_kernel_that_ignores_an_edit_is_rejected():
    case = Case(B=24, V=60, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalties=True, allowed=True, top_n=4)
    inputs = SPEC.make_inputs(case, FP32, CPU, 3)
    tokens, ids, values = naive(**inputs)
    assert is_right(SPEC, (tokens, ids, values), inputs, FP32)
    for left in (
        {"allowed": None},
        {"repetition_penalty": None},
        {"edit_bias": inputs["edit_bias"].clamp(min=0.5)},
        {"edit_counts": torch.full_like(inputs["edit_counts"], -1)},
    ):
        assert not is_right(SPEC, naive(**inputs | left), inputs, FP32), left.keys()
    assert not is_right(SPEC, (tokens, ids.flip(1), values), inputs, FP32)
    assert not is_right(SPEC, (tokens, ids, values + 1e-3), inputs, FP32)


EDITS = {
    "edit_offsets": torch.tensor([0, 2, 4], dtype=torch.int32),
    "edit_ids": torch.tensor([1, 2, 0, 2], dtype=torch.int32),
    "edit_counts": torch.tensor([1, 2, -1, 0], dtype=torch.int32),
    "edit_bias": torch.zeros(4),
}
BAD = [
    ({"edit_ids": torch.tensor([1, 1, 0, 2], dtype=torch.int32)}, "edit_ids: .* row 0"),
    ({"edit_ids": torch.tensor([1, 2, 0, 8], dtype=torch.int32)}, "edit_ids: .* row 1"),
    ({"edit_counts": torch.tensor([1, 2, -2, 0], dtype=torch.int32)}, "edit_counts: .* row 1"),
    ({"edit_bias": torch.tensor([0.0, INF, 0.0, 0.0])}, "edit_bias: .* row 0"),
    ({"edit_bias": None}, "edit_bias: expected a tensor beside"),
    ({"edit_offsets": torch.tensor([0, 3, 2], dtype=torch.int32)}, "edit_offsets: "),
    ({"repetition_penalty": torch.tensor([1.0, 0.0])}, "repetition_penalty: .* row 1"),
    ({"presence_penalty": torch.tensor([math.nan, 0.0])}, "presence_penalty: .* row 0"),
    ({"allowed": torch.zeros(2, 2, dtype=torch.int32)}, "allowed: expected 1 words"),
    ({"allowed": torch.zeros(2, 1, dtype=torch.int32)}, "logits: row 0: "),
    ({"top_n": 9}, "top_n: expected 0 to 8"),
]
BAD_SETTINGS = [
    ({"logits": torch.zeros(2, 0)}, "logits: "),
    ({"temperature": torch.tensor([1.0, -0.1])}, "temperature: .* in row 1"),
    ({"temperature": torch.tensor([1.0, math.nan])}, "temperature: .* in row 1"),
    ({"top_k": torch.tensor([0, -1], dtype=torch.int32)}, "top_k: .* in row 1"),
    ({"top_p": torch.tensor([1.0, 0.0])}, "top_p: .* in row 1"),
    ({"top_p": torch.tensor([1.0, 1.5])}, "top_p: .* in row 1"),
    ({"min_p": torch.tensor([0.0, 1.1])}, "min_p: .* in row 1"),
]


@pytest.mark.parametrize("kernel", [SPEC.reference, naive, prefilter, bisect, library])
def test_wrong_settings_and_edits_are_refused_with_their_row(kernel):
    plain = rows_of(torch.zeros(8), (1.0, 0, 1.0, 0.0), 2)
    refuses(kernel, lambda: plain, BAD_SETTINGS)
    if kernel is not bisect:
        kernel(**plain, **EDITS)
        refuses(kernel, lambda: plain | EDITS, BAD)


@pytest.mark.parametrize("kernel", [SPEC.reference, naive, library, prefilter])
@pytest.mark.parametrize("row", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.1)])
def test_trap_23_a_row_without_a_law_is_refused_by_its_number(kernel, row):
    logits = torch.randn(4, 70)
    for value, place in ((math.nan, 5), (INF, 69), (-INF, slice(None))):
        for kinds in ([row] * 4, [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), row, row]):
            spoilt = logits.clone()
            spoilt[2, place] = value
            with pytest.raises(ValueError, match=r"logits: row 2: expected a finite largest value, got (nan|-?inf)"):
                kernel(spoilt, **settings(kinds, CPU, 0))


def test_trap_23_where_no_kernel_can_raise_such_a_row_gives_a_token_of_the_vocabulary():
    logits = torch.randn(6, 70)
    logits[0], logits[1], logits[5] = -INF, math.nan, 3e38
    logits[2, 5], logits[3, 6], logits[4, ::2] = math.nan, INF, INF
    for row in [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.1)]:
        tokens = bisect(logits, **settings([row] * 6, CPU, 0))
        assert ((tokens >= 0) & (tokens < 70)).all(), row
