"""The peers that call torch's varlen_attn: the arguments, seen by a fake function, and the input that they refuse."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.attention
from op_kernels import assert_right

from rooflab.kernels.flash_attention_varlen import torch_varlen
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.attention import Scores, attend, seen_keys
from rooflab.reference.spec import SCHEMES, Case, Inputs

OPS = ("flash_attention_varlen", "paged_attention")
PAGED = "B=3,context=300,H=4,H_kv=2,D=64,block_size=256,ragged=true"


@cache
def real() -> inspect.Signature:
    """What torch's function takes; its import takes two seconds."""
    from torch.nn.attention.varlen import varlen_attn

    return inspect.signature(varlen_attn)


def with_its_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, looking as if it took what torch's takes."""
    function.__signature__ = real()  # type: ignore[attr-defined]
    return function


def by_reference(*args: Any, **options: Any) -> Any:
    """`varlen_attn` of torch 2.13 by the reference's formula, with torch's ways: the log-sum-exp is (H, T), and inf
    where a query sees no key."""
    bound = real().bind(*args, **options)
    bound.apply_defaults()
    given = bound.arguments
    q, k, v, left = given["query"], given["key"], given["value"], given["window_size"][0]
    assert given["window_size"][1] in (-1, 0) and (given["window_size"] == (-1, -1) or given["window_size"][1] == 0)
    assert given["enable_gqa"] == (q.shape[1] != k.shape[-2])
    causal = given["window_size"][1] == 0
    bounds = given["cu_seq_q"].tolist()
    assert max(b - a for a, b in itertools.pairwise(bounds)) <= given["max_q"]
    out, lse = torch.zeros(q.shape).double(), torch.full((q.shape[1], len(q)), math.inf).double()
    for b, (start, end) in enumerate(itertools.pairwise(bounds)):
        keys, values = (sequence(cache, b, given) for cache in (k, v))
        assert len(keys) <= given["max_k"]
        seen = seen_keys(end - start, len(keys), causal, None if left == -1 else left + 1)
        out[start:end], found = attend(q[start:end], keys, values, seen, Scores(given["scale"]))
        lse[:, start:end] = torch.where(found == -math.inf, math.inf, found).mT
    result = out.to(q.dtype)
    return (result, lse.float()) if given["return_aux"] is not None and given["return_aux"].lse else result


def sequence(cache: torch.Tensor, b: int, given: dict[str, Any]) -> torch.Tensor:
    """The keys or values of sequence b."""
    if given["block_table"] is None:
        return cache[slice(*given["cu_seq_k"][b : b + 2].tolist())]
    length = int(given["seqused_k"][b])
    pages = given["block_table"][b, : -(-length // cache.shape[1])]
    return cache[pages.long()].flatten(0, 1)[:length]


def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """The signature of torch 2.11."""
    raise AssertionError("refused before it is called")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a function in the place of `varlen_attn`, and in that of FlashAttention-2 what is named."""

    def put(function: Callable[..., Any], active: str | None = None) -> None:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active)
        torch_varlen.parameters.cache_clear()

    yield put
    torch_varlen.parameters.cache_clear()


def inputs_of(op: str, text: str) -> Inputs:
    return get_op(op).make_inputs(Case.parse(text), SCHEMES["bf16"], torch.device("cpu"), 0)


@pytest.mark.parametrize("active", [None, "FA3"])
@pytest.mark.parametrize("op", OPS)
def test_every_case_is_right_or_refused_by_name(op: str, active: str | None, installed: Any) -> None:
    installed(with_its_signature(by_reference), active)
    spec, kernel, taken = get_op(op), get_kernel(op, "torch_varlen"), 0
    for case in (*spec.cases["smoke"], *spec.cases["edge"], *([Case.parse(PAGED)] if op == "paged_attention" else [])):
        inputs = spec.make_inputs(case, SCHEMES["bf16"], torch.device("cpu"), 0)
        refusal = kernel.why_not_args(inputs, spec)
        if refusal:
            words = ("has no 'sinks'", "has no 'softcap'", *(() if active else ("pages of a multiple of 256",)))
            assert any(word in refusal.reason for word in words), refusal
            continue
        assert_right(spec, kernel(**inputs), inputs, SCHEMES["bf16"])
        taken += 1
    assert taken >= 2


@pytest.mark.parametrize("active", [None, "FA3"])
@pytest.mark.parametrize(
    ("text", "splits", "window"),
    [
        (PAGED, None, (-1, -1)),
        (PAGED.replace("H=4", "H=2"), 1, (-1, -1)),
        (PAGED + ",window=9", 1, (8, 0)),
        (PAGED + ",queries=7", 1, (-1, 0)),
    ],
)
def test_flash_attention_2_splits_keys_where_it_packs_a_group_s_heads(
    text: str, splits: int | None, window: tuple[int, int], active: str | None, installed: Any
) -> None:
    """It packs them where no window is asked for on either side and each sequence has one query."""
    given: dict[str, Any] = {}

    @with_its_signature
    def noted(*args: Any, **options: Any) -> Any:
        given.update(real().bind(*args, **options).arguments)
        return by_reference(*args, **options)

    installed(noted, active)
    inputs = inputs_of("paged_attention", text)
    get_kernel("paged_attention", "torch_varlen")(**inputs)
    assert (given["num_splits"], given["window_size"]) == (None if active else splits, window)
    assert given["max_q"] == (len(inputs["q"]) if "queries" in text else 1)
    assert given["max_k"] == 256 * inputs["block_table"].shape[1]
    lengths = None if active else inputs["seq_lens"].tolist()
    assert (given["cu_seq_k"] if active else given["cu_seq_k"].diff().tolist()) == lengths


def test_what_torch_2_11_lacks_is_refused_by_name_and_without_keys_it_is_not_called(installed: Any) -> None:
    installed(of_2_11)
    dense, kernel = get_kernel("flash_attention_varlen", "torch_varlen"), get_kernel("paged_attention", "torch_varlen")
    taken = inputs_of("flash_attention_varlen", "B=4,T=20,S=33,H=4,H_kv=2,D=64,causal=true")
    paged = inputs_of("paged_attention", PAGED)
    said = f"UNSUPPORTED: paged_attention/torch_varlen: torch {torch.__version__} has no varlen_attn with block_table; "
    assert dense.why_not_args(taken) is None and str(kernel.why_not_args(paged)).startswith(said)
    with pytest.raises(ValueError, match="has no varlen_attn with block_table"):
        kernel.fn(**paged)
    q, none, offsets = torch.ones(3, 4, 64).half(), torch.ones(0, 2, 64).half(), torch.tensor([0, 3]).int()
    out, lse = dense.fn(q, none, none, offsets, 0 * offsets, 3, 0, return_lse=True)
    assert not out.any() and bool((lse == -math.inf).all()) and lse.shape == (3, 4)


def test_what_flash_attention_cannot_take_is_refused_by_name(installed: Any) -> None:
    for text, active, message in [
        (PAGED.replace("D=64", "D=68"), None, "q: expected D of at most 256 in multiples of 8, got 68"),
        (PAGED.replace("256", "64"), None, "pages of a multiple of 256 tokens for FlashAttention-2, got 64"),
        (PAGED, "FA4", "expected FlashAttention-2 or FA3, got FA4 activated"),
    ]:
        installed(with_its_signature(by_reference), active)
        with pytest.raises(ValueError, match=message):
            get_kernel("paged_attention", "torch_varlen").fn(**inputs_of("paged_attention", text))
