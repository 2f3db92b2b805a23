"""paged_attention: padding of the table, far pages, refusals, wrong kernels, and the formula of flex, run eagerly."""

from __future__ import annotations

import inspect
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_kernels import CPU, META, each, here, is_right, refuses

from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.kernels._attention import get_scale
from rooflab.kernels.paged_attention import flex, library, naive
from rooflab.kernels.registry import get_kernel, kernels
from rooflab.reference.flash_attention import SPEC as DENSE
from rooflab.reference.paged_attention import SPEC
from rooflab.reference.pages import used_slots
from rooflab.reference.spec import SCHEMES, Case, Inputs, Scheme, get_scheme

FP32 = get_scheme("fp32")


def _library_on_a_gpu(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, window=None):
    queries = q.reshape(len(q), k_cache.shape[2], -1, q.shape[2])
    out = library._whole_table(queries, (k_cache, v_cache), block_table, seq_lens, softmax_scale, window)
    return out.reshape(q.shape)


def _inputs(B=2, context=40, H=4, H_kv=2, D=64, block_size=16, ragged=False, seed=0, scheme=FP32):
    case = Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged)
    return SPEC.make_inputs(case, scheme, CPU, seed)


def _passes(out, inputs, scheme=FP32):
    return is_right(SPEC, out, inputs, scheme)


OWN = [kernel for kernel in kernels("paged_attention").values() if kernel.role != "peer"]
HERE = {
    **{kernel.name: kernel.fn for kernel in here("paged_attention")},
    "library's GPU path": _library_on_a_gpu,
    "reference": SPEC.reference,
}


@pytest.mark.parametrize("name", HERE)
def test_padding_of_the_table_and_shared_pages(name):
    """Entries past a sequence's end may be anything; sequences may share pages, and be empty, or all of them empty."""
    inputs = _inputs(B=4, context=100, H=6, H_kv=2, ragged=True, seed=1)
    for padding in (2**31 - 1, -(2**31)):
        for b, count in enumerate((-(-inputs["seq_lens"] // 16)).tolist()):
            inputs["block_table"][b, count:] = padding
        assert _passes(HERE[name](**inputs), inputs)
    shared = inputs | {"block_table": inputs["block_table"][:1].expand(4, -1).contiguous()}
    assert (inputs["seq_lens"] == 0).any() and _passes(HERE[name](**shared), shared)
    assert not HERE[name](**inputs | {"seq_lens": torch.zeros_like(inputs["seq_lens"])}).any()


def _windowed():
    """Each call that takes a window, with one query of a sequence, and with several if it takes them."""
    for name, call in HERE.items():
        taken = inspect.signature(call).parameters
        yield from [
            (name, queries) for queries in (1, 3) if "window" in taken and (queries == 1 or "cu_seqlens_q" in taken)
        ]


@pytest.mark.parametrize(("name", "queries"), list(_windowed()))
def test_what_the_window_hides_may_be_anything(monkeypatch, name, queries):
    """Slots and, where all of a page is hidden, its entry in the table; so may all entries of a sequence at rest."""
    case = Case(B=3, context=70, H=4, H_kv=2, D=32, block_size=16, ragged=True)
    plain = SPEC.make_inputs(case.but(queries=queries) if queries > 1 else case, FP32, CPU, 0) | {"window": 20}
    wanted = SPEC.oracle(plain)[0]
    counts = plain.get("cu_seqlens_q", torch.arange(4)).diff().tolist()
    inputs = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in plain.items()}
    for b, (length, count) in enumerate(zip(plain["seq_lens"].tolist(), counts, strict=True)):
        first = max(0, length - count + 1 - 20) if count else length
        for slot in range(first):
            page = int(plain["block_table"][b, slot // 16])
            inputs["k_cache"][page, slot % 16] = inputs["v_cache"][page, slot % 16] = math.nan
        inputs["block_table"][b, : first // 16] = -1 if b else 2**31 - 1
    for limit in (0, 10**9):
        monkeypatch.setattr(library, "ONE_CALL", limit)
        torch.testing.assert_close(HERE[name](**inputs).double(), wanted, atol=1e-5, rtol=1e-5)


BAD = [
    ([[0]], 9, "seq_lens: expected 0 to 4"),
    ([[-1]], 4, "block_table: expected"),
    ([[3]], 4, "block_table: expected"),
]


@pytest.mark.parametrize(("table", "length", "message"), BAD)
@each(here("paged_attention"))
def test_a_page_or_a_length_out_of_place_is_refused_on_a_cpu(kernel, table, length, message):
    """Also where the layout is known: then `native` checks in C++."""
    cache, ints = torch.ones(3, 4, 1, 16), lambda values: torch.tensor(values, dtype=torch.int32)
    kernel.fn(torch.ones(1, 1, 16), cache, cache, ints([[0]]), ints([4]))
    with pytest.raises(ValueError, match=message):
        kernel.fn(torch.ones(1, 1, 16), cache, cache, ints(table), ints([length]))


@pytest.mark.parametrize("name", ["gqa_packed", "chunked", "split_kv"])
@pytest.mark.parametrize("strides", [(2**30, 64, 64, 1), (64, 2**30, 64, 1)], ids=["pages", "slots"])
def test_pages_and_slots_past_2_31_are_read(name, strides):
    """The third page, or slot, begins at 2**31. The storage is only touched where they are."""
    kernel = get_kernel("paged_attention", name)
    far = torch.empty(2**31 + 4 * 64, dtype=torch.float16)
    far = far.as_strided((3, 2, 1, 64) if strides[0] > 64 else (1, 3, 1, 64), strides)
    far.copy_(torch.randn(far.shape))
    table = torch.tensor([[2, 0] if len(far) > 1 else [0]], dtype=torch.int32)
    rest = {"q": torch.randn(1, 1, 64).half(), "block_table": table, "seq_lens": torch.tensor([3], dtype=torch.int32)}
    with emulating_cuda(lambda *launch: emulate(*launch)):
        found = [kernel.fn(**rest, k_cache=x, v_cache=x) for x in (far, far.contiguous())]
    assert torch.equal(*found)


@each(OWN)
def test_bad_input_is_refused_in_one_sentence(kernel):
    half, ints = (lambda *shape: torch.zeros(shape).half()), lambda *shape: torch.zeros(shape, dtype=torch.int32)
    changes = [
        ({"q": half(2, 3, 64)}, "k_cache: expected a number of heads that divides"),
        ({"q": half(3, 4, 64)}, r"seq_lens: expected shape \(3\), got \(2,\)"),
        ({"cu_seqlens_q": ints(2)}, "cu_seqlens_q: expected shape"),
    ]
    refuses(kernel.fn, lambda: _inputs(scheme=SCHEMES["fp16"]), changes)
    if kernel.name == "chunked":
        without = {"k_scale": None}, "k_cache: expected torch.float16, got torch.float8_e4m3fn"
        fp8 = _inputs(scheme=SCHEMES["kv_fp8"])
        refuses(kernel.fn, lambda: fp8 | {"q": fp8["q"].half()}, [without])
    if kernel.name == "gqa_packed":
        with pytest.raises(ValueError, match="q: expected D of 16, 32, 64, 128 or 256, got 80"):
            kernel.fn(**_inputs(D=80))


def test_long_sequences_on_a_cpu_go_one_by_one_and_short_ones_together(monkeypatch):
    inputs = _inputs(B=4, context=100, H=9, H_kv=3, ragged=True)
    for limit in (0, 10**9):
        monkeypatch.setattr(library, "ONE_CALL", limit)
        assert _passes(library.library(**inputs), inputs)


def test_the_reference_takes_several_queries_of_a_sequence():
    inputs = _inputs(B=2, context=20, H=4, H_kv=2)
    k, v = (inputs[name][inputs["block_table"][:, :2].long()].flatten(1, 2)[:, :20] for name in ("k_cache", "v_cache"))
    q = torch.randn(2, 3, 4, 64)
    out = SPEC.reference(**inputs | {"q": q.flatten(0, 1)}, cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32))
    assert torch.allclose(out, DENSE.reference(q, k, v, causal=True).flatten(0, 1), rtol=0, atol=1e-12)


def _lengths_plus(change):
    def wrong(seq_lens, block_table, **inputs):
        inputs |= {name: inputs[name].nan_to_num(0.0) for name in ("k_cache", "v_cache")}
        lengths = torch.where(seq_lens > 0, (seq_lens + change).clamp(min=1), 0).to(torch.int32)
        return naive.naive(seq_lens=lengths, block_table=block_table.clamp(min=0), **inputs)

    return wrong


WRONG = {
    "drops the last key": _lengths_plus(-1),
    "reads one past the last key": _lengths_plus(1),
    "0 * NaN": lambda **inputs: naive.naive(**inputs) + 0 * inputs["v_cache"].sum(),
    "neighbours' pages": lambda **inputs: naive.naive(
        **inputs | {"block_table": inputs["block_table"].flip(0), "seq_lens": inputs["seq_lens"].flip(0)}
    ),
}


@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_rejected(wrong, scheme):
    case = Case(B=2, context=40, H=4, H_kv=2, D=64, block_size=16, ragged=True)
    scheme = get_scheme(scheme)
    runs = [inputs for label, inputs in SPEC.planted(case, scheme, CPU, 0) if "NaN" not in label]
    assert all(_passes(naive.naive(**inputs), inputs, scheme) for inputs in runs)
    assert not all(_passes(WRONG[wrong](**inputs), inputs, scheme) for inputs in runs)


def test_inputs_have_shuffled_pages_and_poison_wherever_no_token_lies():
    inputs = _inputs(B=3, context=100, ragged=True)
    pages = inputs["block_table"][0, :7]
    assert pages.tolist() != sorted(pages.tolist()) and (inputs["block_table"][:, -1] == -1).all()
    assert inputs["seq_lens"][0] == 100 and inputs["seq_lens"][1] == 0
    owned = int(inputs["seq_lens"].sum())
    assert int((~inputs["v_cache"].isnan().any(-1).any(-1)).sum()) == owned


def test_cost_counts_ragged_lengths_and_shared_pages_once():
    table = torch.tensor([[4, 1], [4, 2], [-1, -1]], dtype=torch.int32)
    lengths = torch.tensor([4, 3, 0], dtype=torch.int32)
    assert used_slots(table, lengths, 6, 2) == (5, 4)
    cache = torch.zeros(6, 2, 1, 64)
    inputs = {"q": torch.zeros(3, 1, 64), "k_cache": cache, "v_cache": cache, "block_table": table, "seq_lens": lengths}
    cost = SPEC.cost_of(inputs)
    assert cost.sfu_ops == 7 and cost.tensor_flops == {"fp32": 4 * 64 * 7}
    assert cost.read_bytes == 2 * 64 * 4 + 5 * 2 * 64 * 4 + 4 * 4 + 3 * 4
    assert cost.write_bytes == 3 * 64 * 4


def test_a_cache_too_big_to_allocate_is_priced_on_meta():
    case = Case(B=256, context=131072, H=32, H_kv=8, D=128, block_size=16, ragged=False)
    inputs = SPEC.make_inputs(case, get_scheme("bf16"), META, 0)
    assert inputs["k_cache"].is_meta and inputs["seq_lens"].device.type == "cpu"
    assert SPEC.cost_of(inputs).read_bytes == pytest.approx(256 * 131072 * 8 * 128 * 2 * 2, rel=1e-3)
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.id)
def test_the_formula(case: Case, scheme: str = "fp32") -> None:
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], CPU, 0)
    hidden = 0 if not case.get("window") else (inputs["seq_lens"] - case["window"]).clamp(min=0)[:, None] // 16
    before = torch.arange(inputs["block_table"].shape[1]) < hidden
    inputs["block_table"].masked_fill_(before, -1)  # as after a page was freed
    judge_all(attended(clean(inputs)), inputs, SCHEMES[scheme])


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
    judge_all(attended(clean(inputs), compiled), inputs, SCHEMES["fp32"])
    torch._dynamo.reset()


def blank(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).bfloat16()


def test_flex_refuses_by_name() -> None:
    of = lambda *shape: {name: blank(*shape) for name in ("k_cache", "v_cache")}
    changes = [
        ({}, "q: expected a tensor on a CUDA device, where it is compiled, got cpu"),
        ({"q": torch.zeros(2, 4, 64)}, "k_cache: expected torch.float32, got torch.bfloat16"),
        ({"q": blank(2, 6, 64)}, "q: expected a power of two of query heads for each of k_cache's, got H=6, H_kv=2"),
        (of(3, 8, 2, 64), "a power of two of at least 16 tokens, got 8"),
        (of(3, 24, 2, 64), "of at least 16 tokens, got 24"),
        ({"v_cache": blank(3, 17, 2, 64)[:, :16]}, "v_cache: expected pages one after another in memory, got v_cache="),
        ({"window": 0}, "window: expected at least 1"),
    ]
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    good = {"q": blank(2, 4, 64), **of(3, 16, 2, 64), "block_table": table, "seq_lens": lengths}
    refuses(flex.flex, lambda: good, changes)


def test_it_is_refused_by_name_where_it_cannot() -> None:
    kernel = get_kernel("paged_attention", "flex")
    assert (kernel.role, kernel.backend, kernel.devices) == ("peer", "torch", ("cuda",))
    assert str(kernel.why_not_here(CPU)) == "UNSUPPORTED: needs a CUDA device"
    case = SPEC.cases["llama3_8b"][0]
    inputs = SPEC.make_inputs(case, SCHEMES["bf16"], META, 0)
    assert kernel.why_not_args(inputs) is None
    assert "has no 'cu_seqlens_q'" in str(kernel.why_not_args({**inputs, "cu_seqlens_q": torch.arange(17)}))
    whole = SPEC.make_inputs(case, SCHEMES["fp32"], META, 0)
    assert "got torch.float32" in str(kernel.why_not_args(whole))


def kvcache_of_flash_attention_3(
    q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal, window_size, softcap, return_softmax_lse
):
    """`flash_attn_with_kvcache` of the package, by the naive kernel."""
    assert causal and q.shape[1] == 1 and window_size[1] in (-1, 0)
    options = {"window": None if window_size[0] < 0 else window_size[0] + 1, "softcap": softcap or None}
    pages = k_cache, v_cache, page_table, cache_seqlens
    out, lse = naive.naive(q[:, 0], *pages, softmax_scale, return_lse=True, **options)
    return (out[:, None], lse[:, :, None]) if return_softmax_lse else out[:, None]


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}, {"return_lse": True}], ids=str)
def test_flash_attention_3_is_given_pages_and_options(options, monkeypatch):
    package = SimpleNamespace(flash_attn_with_kvcache=kvcache_of_flash_attention_3)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    peer, scheme = get_kernel("paged_attention", "flash_attention_3"), get_scheme("bf16")
    inputs = _inputs(B=3, context=50, H=6, ragged=True, scheme=scheme) | options
    assert peer.why_not_args(inputs) is None
    assert _passes(peer.fn(**inputs), inputs, scheme)
    with pytest.raises(ValueError, match="q: expected torch.float16 or .* got torch.float32"):
        peer.fn(**_inputs())
