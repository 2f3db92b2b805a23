"""flash_attention: values worked out by hand, mask edges, strides, refusals, what the tolerance must reject, and what
peers are given and refuse.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from low_precision import attention

from rooflab.kernels.flash_attention import library, naive, online
from rooflab.kernels.registry import get_kernel
from rooflab.reference.flash_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case, Inputs, get_scheme

KERNELS = [
    pytest.param(module.flash_attention, id=module.__name__.split(".")[-1]) for module in (naive, library, online)
]
WITH_OUT = [pytest.param(module.flash_attention, id=module.__name__.split(".")[-1]) for module in (naive, online)]
CPU = torch.device("cpu")
FP32 = get_scheme("fp32")


def _inputs(B=1, T=5, S=5, H=2, H_kv=1, D=64, causal=True, seed=0):
    case = Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal)
    return SPEC.make_inputs(case, FP32, CPU, seed)


def _passes(out, inputs):
    return all(error.passed for error in SPEC.judge((out,), SPEC.oracle(inputs), inputs, FP32))


@pytest.mark.parametrize("kernel", [pytest.param(SPEC.reference, id="reference"), *KERNELS])
def test_equal_scores_average_the_keys_that_a_bottom_right_mask_leaves(kernel):
    v = torch.zeros(1, 3, 1, 64)
    v[0, :, 0, 0] = torch.tensor([3.0, 6.0, 30.0])
    q, k = torch.zeros(1, 2, 1, 64), torch.ones(1, 3, 1, 64)
    assert kernel(q, k, v, True)[0, :, 0, 0].tolist() == pytest.approx([4.5, 13.0])
    assert kernel(q, k, v, False)[0, :, 0, 0].tolist() == pytest.approx([13.0, 13.0])


@pytest.mark.parametrize("kernel", [pytest.param(SPEC.reference, id="reference"), *KERNELS])
def test_queries_that_see_no_key_give_zero(kernel):
    inputs = _inputs(T=70, S=3)
    out = kernel(**inputs)
    assert torch.count_nonzero(out[:, :67]) == 0
    assert torch.allclose(out[0, 67, :].float(), inputs["v"][0, 0].expand(2, 64), atol=1e-6)
    assert out[:, 68:].abs().min() > 0


@pytest.mark.parametrize("kernel", [pytest.param(SPEC.reference, id="reference"), *KERNELS])
def test_no_keys_at_all_give_zero(kernel):
    out = kernel(**_inputs(T=4, S=0, causal=False))
    assert out.shape == (1, 4, 2, 64) and torch.count_nonzero(out) == 0


@pytest.mark.parametrize("kernel", [pytest.param(SPEC.reference, id="reference"), *KERNELS])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_consecutive_query_heads_share_a_key_head(kernel, group):
    q, k = torch.randn(1, 2, 2 * group, 64), torch.randn(1, 4, 2, 64)
    v = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(1, 4, 2, 64).contiguous()
    assert kernel(q, k, v)[0, 0, :, 0].tolist() == pytest.approx([1.0] * group + [2.0] * group)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_softmax_scale_is_taken_as_given(kernel, scale):
    inputs = _inputs(T=7, S=20) | {"softmax_scale": scale}
    assert _passes(kernel(**inputs), inputs)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("T", "S"), [(1, 63), (2, 64), (3, 65), (64, 64), (65, 129), (129, 65)])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_around_a_tile(kernel, T, S, causal):
    inputs = _inputs(T=T, S=S, H=3, causal=causal)
    assert _passes(kernel(**inputs), inputs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_of_one_packed_projection_are_read_in_place_and_left_alone(kernel):
    packed = torch.randn(2, 9, 4 + 2 + 2, 64)
    before = packed.clone()
    q, k, v = packed.split((4, 2, 2), dim=2)
    assert torch.equal(kernel(q, k, v, True), kernel(q.contiguous(), k.contiguous(), v.contiguous(), True))
    assert torch.equal(packed, before)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_lies_past_the_last_key_is_never_heard(kernel):
    (inputs,) = [i for label, i in SPEC.planted(SPEC.cases["smoke"][0], FP32, CPU, 3) if label.startswith("poison")]
    assert inputs["v"]._base is not None and inputs["v"]._base[:, inputs["v"].shape[1]].isnan().all()
    assert _passes(kernel(**inputs), inputs)


def test_online_reads_keys_whose_offsets_pass_2_to_the_31():
    try:
        storage = torch.empty(2**31 + 64, dtype=torch.float16)  # only the touched pages are ever backed by memory
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    k = storage.as_strided((1, 3, 1, 64), (0, 2**30, 64, 1))
    k.copy_(torch.randn(1, 3, 1, 64))
    q = torch.randn(1, 1, 1, 64, dtype=torch.float16)
    assert torch.equal(online.flash_attention(q, k, k), online.flash_attention(q, k.contiguous(), k.contiguous()))


@pytest.mark.parametrize("kernel", WITH_OUT)
def test_out_is_written_where_it_lies(kernel):
    inputs = _inputs(T=6, S=6)
    whole = torch.full((1, 6, 4, 64), torch.nan)
    out = whole[:, :, 1:3]
    assert kernel(**inputs, out=out) is out
    assert _passes(out, inputs)
    assert whole[:, :, 0].isnan().all() and whole[:, :, 3].isnan().all()
    with pytest.raises(ValueError, match=r"out: expected shape \(1, 6, 2, 64\)"):
        kernel(**inputs, out=whole)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bad_input_is_refused_in_one_sentence(kernel):
    for change, message in [
        ({"q": torch.zeros(5, 2, 64)}, "q: expected shape"),
        ({"q": torch.zeros(1, 5, 2, 64, dtype=torch.float64)}, "q: expected torch.float32 or"),
        ({"k": torch.zeros(2, 5, 1, 64)}, "k: expected shape"),
        ({"k": torch.zeros(1, 5, 1, 32)}, "k: expected shape"),
        ({"v": torch.zeros(1, 6, 1, 64)}, "v: expected shape"),
        ({"v": torch.zeros(1, 5, 1, 64, dtype=torch.float16)}, "v: expected torch.float32"),
        ({"k": torch.zeros(1, 5, 64, 2).mT[:, :, :1]}, "k: expected stride 1"),
        ({"k": torch.zeros(1, 5, 3, 64), "v": torch.zeros(1, 5, 3, 64)}, "k: expected a number of heads that divides"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            kernel(**_inputs() | change)
        assert "\n" not in str(error.value)


def test_online_refuses_a_head_dim_that_it_has_no_tile_for():
    inputs = _inputs(D=96)
    assert online.why_not_taken(inputs["q"]) == "needs a head_dim of 16, 32, 64, 128 or 256, got 96"
    with pytest.raises(ValueError, match="head_dim"):
        online.flash_attention(**inputs)


def _top_left(q, k, v, causal):
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask if causal else None, enable_gqa=True)
    return out.transpose(1, 2)


WRONG = {
    "zeros": lambda q, k, v, causal: torch.zeros_like(q),
    "drops the last key": lambda q, k, v, causal: naive.flash_attention(q, k[:, :-1], v[:, :-1], False),
    "drops key 16": lambda q, k, v, causal: naive.flash_attention(
        q, torch.cat((k[:, :16], k[:, 17:]), 1), torch.cat((v[:, :16], v[:, 17:]), 1), False
    ),
    "ten bits of mantissa": lambda q, k, v, causal: naive.flash_attention(
        q.half().float(), k.half().float(), v, causal
    ),
    "scale off by 1e-4": lambda q, k, v, causal: naive.flash_attention(q, k, v, causal, 0.125 * 1.0001),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_rejected(wrong):
    case = Case(B=1, T=4, S=200, H=2, H_kv=1, D=64, causal=False)
    runs = [SPEC.make_inputs(case, FP32, CPU, 0), *(inputs for _, inputs in SPEC.planted(case, FP32, CPU, 0))]
    assert not all(_passes(WRONG[wrong](**inputs), inputs) for inputs in runs)


def test_a_top_left_mask_is_rejected_even_in_bf16():
    case, bf16 = Case(B=1, T=4, S=6, H=2, H_kv=1, D=64, causal=True), get_scheme("bf16")
    inputs = SPEC.make_inputs(case, bf16, CPU, 0)
    assert not SPEC.judge((_top_left(**inputs),), SPEC.oracle(inputs), inputs, bf16)[0].passed


def test_planted_keys_cover_tile_edges_the_end_and_the_diagonal():
    case = Case(B=1, T=40, S=150, H=1, H_kv=1, D=64, causal=True)
    labels = [label for label, _ in SPEC.planted(case, FP32, CPU, 0)]
    assert {"key 0", "key 63", "key 64", "key 127", "key 128", "key 149", "diagonal of query 20"} <= set(labels)


def test_cost_counts_visible_pairs_only():
    cost = SPEC.cost(**_inputs(B=2, T=2, S=3, H=4, H_kv=2))
    pairs = 2 * 4 * (2 + 3)
    assert cost.tensor_flops == {"fp32": 4 * 64 * pairs} and cost.sfu_ops == pairs
    assert cost.read_bytes == 4 * 64 * (2 * 2 * 4 + 2 * 2 * 3 * 2) and cost.write_bytes == 4 * 64 * 2 * 2 * 4
    blind = SPEC.cost(**_inputs(T=5, S=2, H=1))
    assert blind.sfu_ops == 3 and blind.read_bytes == 4 * 64 * (2 + 2 * 2)


def test_a_case_too_big_to_allocate_is_priced_on_meta():
    case = Case(B=64, T=131072, S=131072, H=32, H_kv=8, D=128, causal=True)
    inputs = SPEC.make_inputs(case, get_scheme("bf16"), torch.device("meta"), 0)
    assert SPEC.cost(**inputs).sfu_ops == 64 * 32 * 131072 * 131073 / 2
    fused, steps = (
        get_kernel("flash_attention", "online").traffic_of(inputs),
        get_kernel("flash_attention", "naive").traffic_of(inputs),
    )
    assert steps.bytes > 100 * fused.bytes and steps.launches > fused.launches == 1


@pytest.mark.parametrize("rounded", ["scores", "accumulator", "denominator", None])
@pytest.mark.parametrize("S", [512, 2048])
def test_an_intermediate_in_16_bits_is_seen_by_the_planted_inputs(rounded, S):
    """Random data lets some of these pass: the rounding of the weights hides them."""
    kernel, bf16 = attention(rounded), get_scheme("bf16")
    case = Case(B=1, T=16, S=S, H=2, H_kv=1, D=128, causal=False)
    wrong = []
    for label, inputs in SPEC.planted(case, bf16, CPU, 0):
        if label in ("values of one sign", "a large score shared by all keys"):
            (stats,) = SPEC.judge((kernel(**inputs),), SPEC.oracle(inputs), inputs, bf16)
            wrong += [] if stats.passed else [label]
    assert bool(wrong) is (rounded is not None)


FP8_CASE = Case(B=2, T=20, S=40, H=4, H_kv=2, D=64, causal=True)


def _in_fp8(**changes) -> Inputs:
    return SPEC.make_inputs(FP8_CASE.but(**changes), SCHEMES["fp8_e4m3"], CPU, 0)


def test_flash_attention_3_is_given_descales(monkeypatch):
    given: dict[str, object] = {}
    package = SimpleNamespace(flash_attn_func=lambda *args, **named: given.update(named) or torch.zeros(1))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    peer = get_kernel("flash_attention", "flash_attention_3")
    inputs = _in_fp8()
    assert "q_scale: takes one scale for the 2 query heads of a group" in str(peer.why_not_args(inputs))
    with pytest.raises(ValueError, match="q_scale: takes one scale"):
        peer.fn(**inputs)
    one = inputs | {"q_scale": torch.rand(2, 1).expand(2, 4)}
    assert peer.why_not_args(one) is None
    peer.fn(**one)
    assert torch.equal(given["q_descale"], one["q_scale"][:, :2]) and given["v_descale"] is one["v_scale"]
    each = _in_fp8(H=4, H_kv=4, v_columns=True)
    assert peer.why_not_args(each) is None
    peer.fn(**each)
    assert torch.equal(given["q_descale"], each["q_scale"]) and given["k_descale"] is each["k_scale"]
    given.clear()
    peer.fn(**SPEC.make_inputs(FP8_CASE, SCHEMES["bf16"], CPU, 0))
    assert "q_descale" not in given
    assert "in multiples of 16, got 72" in str(peer.why_not_args(_in_fp8(D=72)))


Q = torch.ones(1, 4, 2, 64).half()


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_of_torch_refuses_bad_input_by_name(name: str) -> None:
    for q, k, causal, message in [
        (Q.float(), Q.float(), False, "q: takes fp16 and bf16, got fp32"),
        (Q[0], Q[0], False, r"q: expected .* got \(4, 2, 64\)"),
        (Q, Q[0], False, r"k: expected .* got \(4, 2, 64\)"),
        (Q, Q.bfloat16(), False, "k: expected torch.float16, got torch.bfloat16"),
        (Q, Q[:, :3], True, "q: is causal at the upper left, got 4 queries and 3 keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            get_kernel("flash_attention", name).fn(q, k, k, causal)


def test_the_efficient_backend_groups_no_heads() -> None:
    with pytest.raises(ValueError, match="k: expected q's 2 heads, as this backend groups none, got 1"):
        get_kernel("flash_attention", "sdpa_efficient").fn(Q, Q[:, :, :1], Q[:, :, :1])
