"""paged_attention: values worked out by hand, page edges, poison in unused slots, refusals, wrong kernels, and the
formula of flex, run eagerly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflab.kernels._attention import get_scale
from rooflab.kernels.paged_attention import flex, gqa_packed, library, naive
from rooflab.kernels.registry import get_kernel
from rooflab.reference.flash_attention import SPEC as DENSE
from rooflab.reference.paged_attention import SPEC
from rooflab.reference.pages import used_slots
from rooflab.reference.spec import SCHEMES, Case, Inputs, Scheme, get_scheme

CPU = torch.device("cpu")
FP32 = get_scheme("fp32")


def _library_on_a_gpu(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None):
    queries = q.reshape(len(q), k_cache.shape[2], -1, q.shape[2])
    out = library._whole_table(queries, k_cache, v_cache, block_table, seq_lens, softmax_scale)
    return out.reshape(q.shape)


KERNELS = [
    pytest.param(naive.paged_attention, id="naive"),
    pytest.param(library.paged_attention, id="library"),
    pytest.param(gqa_packed.paged_attention, id="gqa_packed"),
]
ALL = [
    pytest.param(SPEC.reference, id="reference"),
    *KERNELS,
    pytest.param(_library_on_a_gpu, id="library's GPU path"),
]


def _inputs(B=2, context=40, H=4, H_kv=2, D=64, block_size=16, ragged=False, seed=0):
    case = Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged)
    return SPEC.make_inputs(case, FP32, CPU, seed)


def _passes(out, inputs, scheme=FP32):
    return all(error.passed for error in SPEC.judge((out,), SPEC.oracle(inputs), inputs, scheme))


def _by_hand(lengths, table, block_size=2):
    """Queries of zero average the values; slot s of page p holds 100 p + s, and what no sequence owns is NaN."""
    num_blocks = 6
    slots = 100.0 * torch.arange(num_blocks)[:, None] + torch.arange(block_size)
    v = torch.full((num_blocks, block_size, 1, 64), torch.nan)
    k = v.clone()
    for length, pages in zip(lengths, table, strict=True):
        for token in range(length):
            where = (pages[token // block_size], token % block_size)
            v[where], k[where] = slots[where], 1.0
    return {
        "q": torch.zeros(len(lengths), 1, 64),
        "k_cache": k,
        "v_cache": v,
        "block_table": torch.tensor(table, dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
    }


@pytest.mark.parametrize("kernel", ALL)
def test_pages_are_found_through_the_table(kernel):
    inputs = _by_hand([3, 1, 4], [[4, 1, -1], [0, -1, -1], [5, 2, -1]])
    means = [(400 + 401 + 100) / 3, 0.0, (500 + 501 + 200 + 201) / 4]
    assert kernel(**inputs)[:, 0, 7].tolist() == pytest.approx(means)


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("padding", [-1, 6, 2**31 - 1, -(2**31)])
def test_table_entries_past_the_end_may_be_anything(kernel, padding):
    inputs = _by_hand([2, 3], [[4, padding, padding], [1, 3, padding]])
    assert kernel(**inputs)[:, 0, 0].tolist() == pytest.approx([400.5, (100 + 101 + 300) / 3])


@pytest.mark.parametrize("kernel", ALL)
def test_sequences_may_share_pages(kernel):
    inputs = _by_hand([4, 3], [[4, 1], [4, 2]])
    assert kernel(**inputs)[:, 0, 0].tolist() == pytest.approx([(801 + 201) / 4, (801 + 200) / 3])


@pytest.mark.parametrize("kernel", ALL)
def test_an_empty_sequence_gives_zero_among_others_and_alone(kernel):
    out = kernel(**_by_hand([0, 2, 0], [[-1, -1], [3, -1], [-1, -1]]))
    assert out[:, 0, 0].tolist() == pytest.approx([0, 300.5, 0])
    assert torch.count_nonzero(kernel(**_by_hand([0, 0], [[-1], [-1]]))) == 0


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 20])
def test_consecutive_query_heads_share_a_key_head(kernel, group):
    inputs = _inputs(H=2 * group, H_kv=2)
    inputs["v_cache"][:, :, 0] = 1.0
    inputs["v_cache"][:, :, 1] = 2.0
    assert kernel(**inputs)[1, :, 5].tolist() == pytest.approx([1.0] * group + [2.0] * group)


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("context", [15, 16, 17, 31, 32, 33, 63, 64, 65, 130])
def test_lengths_around_pages_and_tiles(kernel, context):
    inputs = _inputs(B=3, context=context, H=3, H_kv=1, ragged=True, seed=context)
    assert inputs["k_cache"].isnan().any()
    assert _passes(kernel(**inputs), inputs)


def test_long_sequences_on_a_cpu_go_one_by_one_and_short_ones_together(monkeypatch):
    inputs = _inputs(B=4, context=100, H=9, H_kv=3, ragged=True)
    for limit in (0, 10**9):
        monkeypatch.setattr(library, "ONE_CALL", limit)
        assert _passes(library.paged_attention(**inputs), inputs)


@pytest.mark.parametrize("kernel", ALL)
def test_scale_is_taken_as_given_and_inputs_are_left_alone(kernel):
    inputs = _inputs(ragged=True) | {"softmax_scale": 0.4}
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    assert _passes(kernel(**inputs), inputs)
    for name, value in before.items():
        assert torch.equal(inputs[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_does_not_depend_on_its_batch_mates(kernel):
    inputs = _inputs(B=4, context=70, H=3, H_kv=1, ragged=True)
    out = kernel(**inputs)
    for b in range(4):
        one = {name: inputs[name][b : b + 1] for name in ("q", "block_table", "seq_lens")}
        assert torch.allclose(kernel(**inputs | one), out[b : b + 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_queries_caches_and_out(kernel):
    inputs = _inputs(ragged=True)
    q = torch.cat((inputs["q"], inputs["q"]), dim=1)[:, :4]
    k_cache, v_cache = torch.stack((inputs["k_cache"], inputs["v_cache"]), dim=1).unbind(
        1
    )  # one page, keys then values
    whole = torch.full((2, 6, 64), torch.nan)
    out = whole[:, 1:5]
    assert kernel(**inputs | {"q": q, "k_cache": k_cache, "v_cache": v_cache}, out=out) is out
    assert _passes(out, inputs)
    assert whole[:, 0].isnan().all() and whole[:, 5].isnan().all()


def test_gqa_packed_reads_pages_whose_offsets_pass_2_to_the_31():
    try:
        storage = torch.empty(2**31 + 2 * 64, dtype=torch.float16)  # only the touched pages are ever backed by memory
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    far = storage.as_strided((3, 2, 1, 64), (2**30, 64, 64, 1))
    far.copy_(torch.randn(3, 2, 1, 64))
    table, lens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    q, near = torch.randn(1, 1, 64, dtype=torch.float16), far.contiguous()
    assert torch.equal(
        gqa_packed.paged_attention(q, far, far, table, lens), gqa_packed.paged_attention(q, near, near, table, lens)
    )


def test_the_reference_takes_several_queries_of_a_sequence():
    inputs = _inputs(B=2, context=20, H=4, H_kv=2)
    k, v = (inputs[name][inputs["block_table"][:, :2].long()].flatten(1, 2)[:, :20] for name in ("k_cache", "v_cache"))
    q = torch.randn(2, 3, 4, 64)
    out = SPEC.reference(**inputs | {"q": q.flatten(0, 1)}, cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32))
    assert torch.allclose(out, DENSE.reference(q, k, v, causal=True).flatten(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bad_input_is_refused_in_one_sentence(kernel):
    for change, message in [
        ({"q": torch.zeros(2, 1, 4, 64)}, "q: expected shape"),
        ({"q": torch.zeros(2, 3, 64)}, "k_cache: expected a number of heads that divides"),
        ({"q": torch.zeros(2, 4, 64, dtype=torch.float16)}, "k_cache: expected torch.float16"),
        ({"v_cache": torch.zeros(9, 16, 1, 64)}, "v_cache: expected shape"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, "block_table: expected shape"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int64)}, "block_table: expected torch.int32"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens: expected torch.int32"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens: expected shape"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            kernel(**_inputs() | change)
        assert "\n" not in str(error.value)


def test_gqa_packed_refuses_a_head_dim_that_it_has_no_tile_for():
    with pytest.raises(ValueError, match="q: needs a head_dim of 16, 32, 64, 128 or 256, got 80"):
        gqa_packed.paged_attention(**_inputs(D=80))


def _lengths_plus(change):
    def wrong(seq_lens, block_table, **inputs):
        inputs |= {name: inputs[name].nan_to_num(0.0) for name in ("k_cache", "v_cache")}
        lengths = torch.where(seq_lens > 0, (seq_lens + change).clamp(min=1), 0).to(torch.int32)
        return naive.paged_attention(seq_lens=lengths, block_table=block_table.clamp(min=0), **inputs)

    return wrong


def _scores_masked_but_not_values(q, k_cache, v_cache, block_table, seq_lens):
    return naive.paged_attention(q, k_cache, v_cache, block_table, seq_lens) + 0 * v_cache.sum()


WRONG = {
    "drops the last key": _lengths_plus(-1),
    "reads one past the last key": _lengths_plus(1),
    "0 * NaN": _scores_masked_but_not_values,
    "neighbours' pages": lambda **inputs: naive.paged_attention(
        **inputs | {"block_table": inputs["block_table"].flip(0), "seq_lens": inputs["seq_lens"].flip(0)}
    ),
}


@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_rejected(wrong, scheme):
    case = Case(B=2, context=40, H=4, H_kv=2, D=64, block_size=16, ragged=True)
    scheme = get_scheme(scheme)
    runs = [inputs for _, inputs in SPEC.planted(case, scheme, CPU, 0)]
    assert all(_passes(naive.paged_attention(**inputs), inputs, scheme) for inputs in runs)
    assert not all(_passes(WRONG[wrong](**inputs), inputs, scheme) for inputs in runs)


def test_inputs_have_shuffled_pages_and_poison_wherever_no_token_lies():
    inputs = _inputs(B=3, context=100, ragged=True)
    pages = inputs["block_table"][0, :7]
    assert pages.tolist() != sorted(pages.tolist()) and (inputs["block_table"][:, -1] == -1).all()
    assert inputs["seq_lens"][0] == 100 and inputs["seq_lens"][1] == 0
    owned = int(inputs["seq_lens"].sum())
    assert int((~inputs["v_cache"].isnan().any(-1).any(-1)).sum()) == owned


def test_cost_counts_ragged_lengths_and_shared_pages_once():
    inputs = _by_hand([4, 3, 0], [[4, 1], [4, 2], [-1, -1]])
    assert used_slots(inputs["block_table"], inputs["seq_lens"], 6, 2) == (5, 4)
    cost = SPEC.cost(**inputs)
    assert cost.sfu_ops == 7 and cost.tensor_flops == {"fp32": 4 * 64 * 7}
    assert cost.read_bytes == 2 * 64 * 4 + 5 * 2 * 64 * 4 + 4 * 4 + 3 * 4
    assert cost.write_bytes == 3 * 64 * 4


def test_a_cache_too_big_to_allocate_is_priced_on_meta():
    case = Case(B=256, context=131072, H=32, H_kv=8, D=128, block_size=16, ragged=False)
    inputs = SPEC.make_inputs(case, get_scheme("bf16"), torch.device("meta"), 0)
    assert inputs["k_cache"].is_meta and inputs["seq_lens"].device.type == "cpu"
    assert SPEC.cost(**inputs).read_bytes == pytest.approx(256 * 131072 * 8 * 128 * 2 * 2, rel=1e-3)
    ladder = (get_kernel("paged_attention", name) for name in ("naive", "library", "gqa_packed"))
    naive, library, gqa_packed = (kernel.traffic_of(inputs).bytes for kernel in ladder)
    assert naive > library > gqa_packed


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


def judge_all(found: tuple[torch.Tensor, ...], inputs: Inputs, scheme: Scheme) -> None:
    oracle = SPEC.oracle(inputs)
    for stats in SPEC.judge(found[: len(oracle)], oracle, inputs, scheme):
        assert stats.passed, stats.describe()


@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.id)
def test_the_formula(case: Case, scheme: str) -> None:
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], torch.device("cpu"), 0)
    judge_all(attended(clean(inputs)), inputs, SCHEMES[scheme])


def test_planted_keys() -> None:
    for text in [
        "B=3,context=50,H=4,H_kv=2,D=64,block_size=16,ragged=true",
        "B=2,context=70,H=4,H_kv=2,D=64,block_size=16,ragged=false,window=20",
    ]:
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
    judge_all(attended(clean(inputs), compiled), inputs, SCHEMES["fp32"])
    torch._dynamo.reset()


def blank(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).bfloat16()


def test_flex_refuses_by_name() -> None:
    for changes, message in [
        ({}, "q: expected a tensor on a CUDA device, where it is compiled, got cpu"),
        ({"q": torch.zeros(2, 4, 64)}, "k_cache: expected torch.float32, got torch.bfloat16"),
        ({"q": blank(2, 6, 64)}, "q: expected a power of two of query heads for each of k_cache's, got 3"),
        (
            {"k_cache": blank(3, 8, 2, 64), "v_cache": blank(3, 8, 2, 64)},
            "a power of two of at least 16 tokens, got 8",
        ),
        ({"k_cache": blank(3, 24, 2, 64), "v_cache": blank(3, 24, 2, 64)}, "of at least 16 tokens, got 24"),
        (
            {"v_cache": blank(3, 17, 2, 64)[:, :16]},
            "v_cache: expected pages one after another in memory, got strides",
        ),
        ({"window": 0}, "window: expected at least 1"),
    ]:
        given = {
            "q": blank(2, 4, 64),
            "k_cache": blank(3, 16, 2, 64),
            "v_cache": blank(3, 16, 2, 64),
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
