"""paged_attention/flex: its formula run eagerly, its graph traced whole, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflab.kernels._attention import get_scale
from rooflab.kernels.paged_attention import flex
from rooflab.kernels.registry import get_kernel
from rooflab.reference.paged_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case, Inputs, Scheme

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


def attended(inputs: Inputs, call: Any = flex.attend) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [inputs[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
    out, lse = call(*tensors, get_scale(inputs["q"], None), inputs.get("window"), inputs.get("softcap"))
    return out.to(inputs["q"].dtype), lse


def judge(found: tuple[torch.Tensor, ...], inputs: Inputs, scheme: Scheme) -> None:
    oracle = SPEC.oracle(inputs)
    for stats in SPEC.judge(found[: len(oracle)], oracle, inputs, scheme):
        assert stats.passed, stats.describe()


@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.id)
def test_the_formula(case: Case, scheme: str) -> None:
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], torch.device("cpu"), 0)
    judge(attended(clean(inputs)), inputs, SCHEMES[scheme])


@pytest.mark.parametrize(
    "text",
    [
        "B=3,context=50,H=4,H_kv=2,D=64,block_size=16,ragged=true",
        "B=2,context=70,H=4,H_kv=2,D=64,block_size=16,ragged=false,window=20",
    ],
)
def test_planted_keys(text: str) -> None:
    for label, inputs in SPEC.planted(Case.parse(text), SCHEMES["fp32"], torch.device("cpu"), 0):
        oracle = SPEC.oracle(inputs)
        (stats,) = SPEC.judge(attended(clean(inputs))[:1], oracle, inputs, SCHEMES["fp32"])
        assert stats.passed, (label, stats.describe())


def test_the_mask_lists_whole_pages_alone() -> None:
    table = torch.tensor([[4, 1, -1], [2, -1, -1], [-1, -1, -1], [3, 0, 5]], dtype=torch.int32)
    lengths = torch.tensor([37, 15, 0, 48], dtype=torch.int32)
    mask = flex._whole_pages(table, lengths, torch.zeros(6, 16, 1, 64), None)
    counts, listed = mask.kv_num_blocks.flatten().tolist(), mask.kv_indices[:, 0, 0].tolist()
    assert counts == [2, 0, 0, 3]
    assert [pages[:count] for pages, count in zip(listed, counts, strict=True)] == [[4, 1], [], [], [3, 0, 5]]
    own = [[key for key in range(96) if mask.mask_mod(torch.tensor(b), 0, 0, torch.tensor(key))] for b in range(4)]
    assert own == [[*range(16, 32), *range(64, 80)], [], [], [*range(16), *range(48, 64), *range(80, 96)]]


def test_it_is_one_graph_and_nothing_in_it_runs_beside() -> None:
    """Traced by torch.compile with `fullgraph`; the kernel that it then compiles needs a CUDA device."""
    torch._dynamo.reset()
    compiled = torch.compile(flex.attend, fullgraph=True, dynamic=False, backend="aot_eager")
    case = Case.parse("B=3,context=50,H=4,H_kv=2,D=64,block_size=16,ragged=true")
    inputs = SPEC.make_inputs(case, SCHEMES["fp32"], torch.device("cpu"), 0)
    judge(attended(clean(inputs), compiled), inputs, SCHEMES["fp32"])
    torch._dynamo.reset()


def cache(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).bfloat16()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "q: expected a tensor on a CUDA device, where it is compiled, got cpu"),
        ({"q": torch.zeros(2, 4, 64)}, "k_cache: expected torch.float32, got torch.bfloat16"),
        ({"q": cache(2, 6, 64)}, "q: expected a power of two of query heads for each of k_cache's, got 3"),
        ({"k_cache": cache(3, 8, 2, 64), "v_cache": cache(3, 8, 2, 64)}, "a power of two of at least 16 tokens, got 8"),
        ({"k_cache": cache(3, 24, 2, 64), "v_cache": cache(3, 24, 2, 64)}, "of at least 16 tokens, got 24"),
        ({"v_cache": cache(3, 17, 2, 64)[:, :16]}, "v_cache: expected pages one after another in memory, got strides"),
        ({"window": 0}, "window: expected at least 1"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    given = {
        "q": cache(2, 4, 64),
        "k_cache": cache(3, 16, 2, 64),
        "v_cache": cache(3, 16, 2, 64),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        flex.paged_attention(**{**given, **changes})


def test_it_is_refused_by_name_where_it_cannot() -> None:
    kernel = get_kernel("paged_attention", "flex")
    assert (kernel.role, kernel.backend, kernel.devices) == ("peer", "torch", ("cuda",))
    assert str(kernel.why_not_here(torch.device("cpu"))) == "UNSUPPORTED: needs a CUDA device"
    case = SPEC.cases["llama3_8b"][0]
    inputs = SPEC.make_inputs(case, SCHEMES["bf16"], torch.device("meta"), 0)
    assert kernel.why_not_args(inputs) is None
    assert "has no 'cu_seqlens_q'" in str(kernel.why_not_args({**inputs, "cu_seqlens_q": torch.arange(17)}))
    whole = SPEC.make_inputs(case, SCHEMES["fp32"], torch.device("meta"), 0)
    assert "got torch.float32" in str(kernel.why_not_args(whole))
