"""paged_attention/flex: its formula, run eagerly, and the pages that its mask lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import CPU, assert_right

from rooflab.kernels._attention import get_scale
from rooflab.kernels.paged_attention import flex
from rooflab.reference.paged_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case, Inputs

DECODE = [
    case
    for case in (*SPEC.cases["smoke"], *SPEC.cases["edge"])
    if not case.get("queries") and not case.get("mixed") and not case.get("sinks")
]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def clean(inputs: Inputs) -> Inputs:
    """The same with large numbers where nothing was written: run eagerly, every slot is multiplied by its weight, and
    0 times NaN is NaN; the compiled kernel reads the pages that the mask lists."""
    return {**inputs, "k_cache": inputs["k_cache"].nan_to_num(7.0), "v_cache": inputs["v_cache"].nan_to_num(100.0)}


def check(inputs: Inputs, call: Any = flex.attend) -> None:
    tensors = [inputs[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
    out, lse = call(*tensors, get_scale(inputs["q"], None), inputs.get("window"), inputs.get("softcap"))
    found = out.to(inputs["q"].dtype), lse
    assert_right(SPEC, found if inputs.get("return_lse") else found[0], inputs, SCHEMES["fp32"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.id)
def test_the_formula(case: Case) -> None:
    inputs = SPEC.make_inputs(case, SCHEMES["fp32"], CPU, 0)
    hidden = 0 if not case.get("window") else (inputs["seq_lens"] - case["window"]).clamp(min=0)[:, None] // 16
    before = torch.arange(inputs["block_table"].shape[1]) < hidden
    inputs["block_table"].masked_fill_(before, -1)  # as after a page was freed
    check(clean(inputs))


def test_the_mask_lists_whole_pages_alone() -> None:
    table = torch.tensor([[4, 1, -1], [2, -1, -1], [-1, -1, -1], [3, 0, 5]], dtype=torch.int32)
    lengths = torch.tensor([37, 15, 0, 48], dtype=torch.int32)
    mask = flex._whole_pages(table, lengths, torch.zeros(6, 16, 1, 64), None)
    counts, listed = mask.kv_num_blocks.flatten().tolist(), mask.kv_indices[:, 0, 0].tolist()
    assert counts == [2, 0, 0, 3]
    assert [pages[:count] for pages, count in zip(listed, counts, strict=True)] == [[4, 1], [], [], [3, 0, 5]]
    windowed = flex._whole_pages(table, lengths, torch.zeros(6, 16, 1, 64), 22)
    assert windowed.kv_num_blocks.flatten().tolist() == [1, 0, 0, 1]
    assert (windowed.kv_indices[0, 0, 0, 0], windowed.kv_indices[3, 0, 0, 0]) == (1, 5)
    own = [[key for key in range(96) if mask.mask_mod(torch.tensor(b), 0, 0, torch.tensor(key))] for b in range(4)]
    assert own == [[*range(16, 32), *range(64, 80)], [], [], [*range(16), *range(48, 64), *range(80, 96)]]


def test_it_is_one_graph_and_nothing_in_it_runs_beside() -> None:
    """Traced by torch.compile with `fullgraph`; the kernel that it then compiles needs a CUDA device."""
    torch._dynamo.reset()
    compiled = torch.compile(flex.attend, fullgraph=True, dynamic=False, backend="aot_eager")
    case = Case.parse("B=3,context=50,H=4,H_kv=2,D=64,block_size=16,ragged=true")
    inputs = SPEC.make_inputs(case, SCHEMES["fp32"], CPU, 0)
    check(clean(inputs), compiled)
    torch._dynamo.reset()
