"""flash_attention/flash_attention_3: what its package is given in fp8, and what it cannot take."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rooflab.kernels.registry import get_kernel
from rooflab.reference.flash_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case, Inputs

CPU = torch.device("cpu")
BASE = Case(B=2, T=20, S=40, H=4, H_kv=2, D=64, causal=True)


def _inputs(**changes) -> Inputs:
    return SPEC.make_inputs(BASE.but(**changes), SCHEMES["fp8_e4m3"], CPU, 0)


def test_flash_attention_3_is_given_descales(monkeypatch):
    given: dict[str, object] = {}
    package = SimpleNamespace(flash_attn_func=lambda *args, **named: given.update(named) or torch.zeros(1))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    peer = get_kernel("flash_attention", "flash_attention_3")
    inputs = _inputs()
    assert "q_scale: takes one scale for the 2 query heads of a group" in str(peer.why_not_args(inputs))
    with pytest.raises(ValueError, match="q_scale: takes one scale"):
        peer.fn(**inputs)
    one = inputs | {"q_scale": torch.rand(2, 1).expand(2, 4)}
    assert peer.why_not_args(one) is None
    peer.fn(**one)
    assert torch.equal(given["q_descale"], one["q_scale"][:, :2]) and given["v_descale"] is one["v_scale"]
    each = _inputs(H=4, H_kv=4, v_columns=True)
    assert peer.why_not_args(each) is None
    peer.fn(**each)
    assert torch.equal(given["q_descale"], each["q_scale"]) and given["k_descale"] is each["k_scale"]
    given.clear()
    peer.fn(**SPEC.make_inputs(BASE, SCHEMES["bf16"], CPU, 0))
    assert "q_descale" not in given
    assert "in multiples of 16, got 72" in str(peer.why_not_args(_inputs(D=72)))
