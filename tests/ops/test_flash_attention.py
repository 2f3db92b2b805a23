"""flash_attention: scales, rows that see no key, intermediates in 16 bits, and the arguments of a peer."""

from __future__ import annotations

import inspect
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, assert_right, each, here, is_right

from rooflab.kernels.flash_attention import masked_tiles, online, packed_gqa, persistent, tma
from rooflab.kernels.registry import get_kernel, kernels
from rooflab.reference.flash_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case, get_scheme

OWN = [kernel for kernel in kernels("flash_attention").values() if kernel.role != "peer" and kernel.name != "fp8"]
SMALL = {
    "online": online.Config(16, 16, 4, 1),
    "masked_tiles": masked_tiles.Config(16, 16, 4, 1),
    "tma": tma.Config(64, 32, 4, 2),
    "packed_gqa": packed_gqa.Config(64, 32, 4, 2),
    "persistent": persistent.PersistentConfig(64, 32, 4, 2, 1),
}
FP32 = get_scheme("fp32")


@each([kernel for kernel in OWN if kernel in here("flash_attention")])
def test_any_scale_is_taken(kernel):
    small = {"config": SMALL[kernel.name]} if kernel.name in SMALL else {}
    for change in ({"softmax_scale": 0.0}, {"softmax_scale": -0.4}, {"softmax_scale": 1.0, "softcap": 2.0}):
        case = Case(B=1, T=7, S=40, H=4, H_kv=2, D=16, causal=True)
        inputs = SPEC.make_inputs(case, SCHEMES["fp16"], CPU, 0) | change
        if kernel.why_not_args(inputs) is None:
            assert_right(SPEC, kernel(**inputs, **small), inputs, SCHEMES["fp16"])


def test_the_reference_does_not_hear_a_value_that_a_query_does_not_see():
    case = Case(B=1, T=300, S=300, H=2, H_kv=1, D=64, causal=True)
    inputs = SPEC.make_inputs(case, FP32, CPU, 0)
    wanted, spoilt = SPEC.oracle(inputs)[0], {**inputs, "v": inputs["v"].clone()}
    spoilt["v"][0, 299, 0, 5], spoilt["v"][0, 299, 0, 6] = math.inf, math.nan
    (found,) = oracle = SPEC.oracle(spoilt)
    assert torch.equal(found[:, :299], wanted[:, :299]) and found[0, 299, 0, 5] == math.inf
    assert found[0, 299, 0, 6].isnan() and torch.equal(found[..., 7:], wanted[..., 7:])
    assert SPEC.tolerance(spoilt, oracle, FP32)[0][:, :299].isfinite().all()
    windowed = {**inputs, "window": 10}
    hidden = {**windowed, "v": inputs["v"].index_fill(1, torch.tensor([0]), -math.inf)}
    found, wanted = SPEC.oracle(hidden), SPEC.oracle(windowed)
    assert torch.equal(found[0][:, 10:], wanted[0][:, 10:]) and (found[0][:, :10] == -math.inf).all()
    assert SPEC.tolerance(hidden, found, FP32)[0][:, 10:].isfinite().all()


@each(OWN)
def test_nothing_to_see_is_zero_and_the_sinks_alone(kernel):
    q, none, sinks = torch.randn(1, 5, 4, 64).half(), torch.randn(1, 0, 2, 64).half(), torch.arange(4.0)
    keys = torch.randn(1, 9, 2, 64).half()
    assert kernel.fn(q[:, :0], keys, keys).shape == (1, 0, 4, 64) and not kernel.fn(q, none, none).any()
    if "sinks" in inspect.signature(kernel.fn).parameters:
        out, lse = kernel.fn(q, none, none, return_lse=True)
        assert not out.any() and (lse == -math.inf).all()
        _, lse = kernel.fn(q, none, none, sinks=sinks, return_lse=True)
        torch.testing.assert_close(lse, sinks.expand(1, 5, 4))


def attention(rounded, q, k, v, causal=False):
    """In fp32, but for `rounded` in the dtype of the inputs: wrong, and hard to see.  Sums are rounded after each tile
    of 64 keys, as a kernel rounds them that keeps them in 16 bits."""
    keep = {name: (lambda x: x.to(q.dtype).float()) if name == rounded else (lambda x: x) for name in ROUNDED}
    queries = q.transpose(1, 2).float()
    keys, values = (x.transpose(1, 2).float().repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (k, v))
    scores = keep["scores"](queries @ keys.mT * q.shape[-1] ** -0.5)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total, acc = torch.zeros_like(weights[..., :1]), torch.zeros_like(queries)
    for start in range(0, k.shape[1], 64):
        tile = weights[..., start : start + 64]
        total = keep["denominator"](total + tile.sum(-1, keepdim=True))
        acc = keep["accumulator"](acc + tile.to(q.dtype).float() @ values[:, :, start : start + 64])
    return (acc / total).transpose(1, 2).to(q.dtype).contiguous()


ROUNDED = ("scores", "accumulator", "denominator")


@pytest.mark.parametrize("rounded", [*ROUNDED, None])
@pytest.mark.parametrize("S", [512, 2048])
def test_an_intermediate_in_16_bits_is_seen_by_the_planted_inputs(rounded, S):
    """Random data lets some of these pass: the rounding of the weights hides them."""
    bf16 = get_scheme("bf16")
    case = Case(B=1, T=16, S=S, H=2, H_kv=1, D=128, causal=False)
    wrong = []
    for label, inputs in SPEC.planted(case, bf16, CPU, 0):
        if label in ("values of one sign", "a large score shared by all keys"):
            wrong += [] if is_right(SPEC, attention(rounded, **inputs), inputs, bf16) else [label]
    assert bool(wrong) is (rounded is not None)


def test_flash_attention_3_is_given_descales(monkeypatch):
    given: dict[str, object] = {}
    package = SimpleNamespace(flash_attn_func=lambda *args, **named: given.update(named) or torch.zeros(1))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    peer = get_kernel("flash_attention", "flash_attention_3")
    case = Case(B=2, T=20, S=40, H=4, H_kv=2, D=64, causal=True)
    inputs = SPEC.make_inputs(case, SCHEMES["fp8_e4m3"], CPU, 0)
    with pytest.raises(ValueError, match="q_scale: expected one scale for the query heads of a group"):
        peer.fn(**inputs)
    one = inputs | {"q_scale": torch.rand(2, 1).expand(2, 4)}
    peer.fn(**one)
    assert torch.equal(given["q_descale"], one["q_scale"][:, :2]) and given["v_descale"] is one["v_scale"]
    each = SPEC.make_inputs(case.but(H_kv=4, v_columns=True), SCHEMES["fp8_e4m3"], CPU, 0)
    peer.fn(**each)
    assert torch.equal(given["q_descale"], each["q_scale"]) and given["k_descale"] is each["k_scale"]
    given.clear()
    peer.fn(**SPEC.make_inputs(case, SCHEMES["bf16"], CPU, 0))
    assert "q_descale" not in given
