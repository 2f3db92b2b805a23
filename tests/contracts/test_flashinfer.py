"""The adapters to FlashInfer: the arguments that they pass, seen by a fake module, and the input that they refuse."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import fake_flashinfer
import pytest
import torch
from op_kernels import assert_right

from rooflab.bench.core.call import Rotation
from rooflab.bench.core.check import check_kernel
from rooflab.kernels import _flashinfer as adapter
from rooflab.kernels.registry import Kernel, get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case, Inputs

OPS = ("flash_attention", "flash_attention_varlen", "paged_attention", "mla_decode")
SMALL = {"mla_decode": ("B=3,context=70,H=16,latent=512,rotary=64,block_size=16,ragged=true,lse=true",)}
"""Cases beside those of the suites, few of which FlashInfer takes."""


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake in FlashInfer's place, with no wrapper left over from another test."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(adapter, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(fake_flashinfer.Wrapper, "made", [])
    adapter.kept_wrapper.cache_clear()


def on_cpu(op: str) -> Kernel:
    """The adapter, as a kernel that a CPU can check."""
    kernel = get_kernel(op, "flashinfer")
    return dataclasses.replace(kernel, backend="torch", devices=("cpu",), requires=(), min_sm=None)


def inputs_of(op: str, text: str) -> Inputs:
    return get_op(op).make_inputs(Case.parse(text), SCHEMES["bf16"], torch.device("cpu"), 0)


@pytest.mark.parametrize("scheme", ["bf16", "fp16"])
@pytest.mark.parametrize("op", OPS)
def test_every_case_is_right_or_refused_by_name(op: str, scheme: str) -> None:
    spec, kernel, taken = get_op(op), get_kernel(op, "flashinfer"), 0
    cases = [*spec.cases["smoke"], *spec.cases["edge"], *map(Case.parse, SMALL.get(op, ()))]
    for case in cases:
        inputs = spec.make_inputs(case, SCHEMES[scheme], torch.device("cpu"), 0)
        refusal = kernel.why_not_args(inputs, spec)
        if refusal:
            words = ("expected D of", "latent_dim", "has no 'sinks'", "_scale")
            assert any(word in refusal.reason for word in words), refusal
            continue
        assert_right(spec, kernel(**inputs), inputs, SCHEMES[scheme])
        taken += 1
    assert taken >= 2


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("flash_attention_varlen", "B=4,T=20,S=33,H=4,H_kv=2,D=64,causal=true"),
        ("paged_attention", "B=3,context=40,H=8,H_kv=2,D=64,block_size=8,ragged=true,queries=7"),
        ("mla_decode", SMALL["mla_decode"][0]),
    ],
)
def test_it_passes_the_whole_check_as_lengths_change_under_it(op: str, text: str) -> None:
    """Also `other data in the same memory`, of which torch's version counters say nothing: no plan may be kept."""
    spec = get_op(op)
    result = check_kernel(on_cpu(op), spec, spec.check_case(Case.parse(text)), SCHEMES["bf16"], "cpu", planted=False)
    assert result.status == "OK", result.describe()


@pytest.mark.parametrize("op", OPS)
def test_where_nothing_is_seen_it_is_zero_and_minus_infinity_without_a_call(op: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    q, none, lengths = torch.ones(2, 4, 64).half(), torch.ones(0, 2, 64).half(), torch.tensor([0, 0], dtype=torch.int32)
    cache, table = torch.full((3, 16, 2, 64), math.nan).half(), torch.full((2, 1), -1, dtype=torch.int32)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    latents = torch.ones(2, 4, 576).half(), torch.full((3, 16, 576), math.nan).half()
    arguments = {
        "flash_attention": (q[None], none[None], none[None]),
        "flash_attention_varlen": (q, none, none, offsets, 0 * offsets, 2, 0),
        "paged_attention": (q, cache, cache, table, lengths),
        "mla_decode": (*latents, table, lengths, 512, 0.1),
    }[op]
    out, lse = get_kernel(op, "flashinfer").fn(*arguments, return_lse=True)
    assert not out.any() and bool((lse == -math.inf).all()) and lse.dtype == torch.float32
    assert lse.shape == out.shape[:-1]


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("flash_attention", "B=1,T=20,S=13,H=4,H_kv=2,D=64,causal=true,lse=true"),
        ("flash_attention", "B=2,T=20,S=13,H=4,H_kv=2,D=64,causal=true,lse=true"),
        ("flash_attention_varlen", "B=4,T=20,S=13,H=4,H_kv=2,D=64,causal=true,lse=true"),
        ("paged_attention", "B=3,context=20,H=4,H_kv=2,D=64,block_size=8,ragged=false,queries=20,lse=true"),
    ],
)
def test_more_causal_queries_than_keys_never_reach_it(op: str, text: str) -> None:
    """What sees no key is a sequence of its own; with a window too.  The fake fails where they reach it."""
    spec, inputs = get_op(op), inputs_of(op, text)
    if op == "paged_attention":
        inputs["seq_lens"] = torch.tensor([20, 13, 0], dtype=torch.int32)
    for changed in (inputs, inputs | {"window": 5}):
        out, lse = get_kernel(op, "flashinfer").fn(**changed)
        assert (lse == -math.inf).any() and lse.isfinite().any()
        assert_right(spec, (out, lse), changed, SCHEMES["bf16"])


PAGED = "B=2,context=40,H=4,H_kv=2,D=64,block_size=16,ragged=false"


def test_sequences_that_it_cannot_take_are_refused() -> None:
    q = torch.ones(2, 9, 4, 64).half()[:, :8]
    with pytest.raises(ValueError, match="q: expected sequences one after another in memory"):
        get_kernel("flash_attention", "flashinfer").fn(q, q.clone(), q.clone())
    packed = torch.ones(2, 8, 3, 4, 64).half().unbind(2)
    assert get_kernel("flash_attention", "flashinfer").fn(*packed).shape == (2, 8, 4, 64)
    for name, value in (("window", 0), ("softcap", -1.0)):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            get_kernel("paged_attention", "flashinfer").fn(**inputs_of("paged_attention", PAGED) | {name: value})


@pytest.mark.parametrize("op", OPS)
def test_the_log_sum_exp_is_read_and_written_once_more_in_the_other_base(op: str) -> None:
    spec, kernel = get_op(op), get_kernel(op, "flashinfer")
    inputs = spec.make_inputs(spec.cases["llama3_8b"][0], SCHEMES["bf16"], torch.device("meta"), 0)
    once, turned = (kernel.traffic_of({**inputs, "return_lse": lse}) for lse in (False, True))
    rows = inputs["q"].numel() // inputs["q"].shape[-1]
    assert turned.bytes == once.bytes + 3 * 4 * rows and turned.launches == once.launches + 1


def test_what_is_timed_is_run_alone() -> None:
    sets = [inputs_of("paged_attention", PAGED + ",window=9") for _ in range(2)]
    rotation = Rotation(on_cpu("paged_attention"), get_op("paged_attention"), sets)
    made = list(fake_flashinfer.Wrapper.made)
    for _ in range(4):
        rotation()
    assert [wrapper.plans for wrapper in fake_flashinfer.Wrapper.made] == [1, 1] and len(made) == 2
