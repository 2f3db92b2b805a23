"""paged_attention: padding of the table, windows, far pages, the content of its inputs, and the arguments of a peer."""

from __future__ import annotations

import inspect
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, assert_right, emulated, here

from rooflab.kernels import _device
from rooflab.kernels.paged_attention import library, naive
from rooflab.kernels.registry import get_kernel
from rooflab.reference.flash_attention import SPEC as DENSE
from rooflab.reference.paged_attention import SPEC
from rooflab.reference.spec import Case, get_scheme

FP32 = get_scheme("fp32")


def library_on_a_gpu(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, window=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "counted_device_type", "cuda")
        return library.library(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, window=window)


def _inputs(B=2, context=40, H=4, H_kv=2, D=64, block_size=16, ragged=False, seed=0, scheme=FP32):
    case = Case(B=B, context=context, H=H, H_kv=H_kv, D=D, block_size=block_size, ragged=ragged)
    return SPEC.make_inputs(case, scheme, CPU, seed)


HERE = {
    **{kernel.name: kernel.fn for kernel in here("paged_attention")},
    "library's GPU path": library_on_a_gpu,
    "reference": SPEC.reference,
}


@pytest.mark.parametrize("name", HERE)
def test_padding_of_the_table_and_shared_pages(name):
    """Entries past a sequence's end may be anything; sequences may share pages, and be empty, or all of them empty."""
    inputs = _inputs(B=4, context=100, H=6, H_kv=2, ragged=True, seed=1)
    for padding in (2**31 - 1, -(2**31)):
        for b, count in enumerate((-(-inputs["seq_lens"] // 16)).tolist()):
            inputs["block_table"][b, count:] = padding
        assert_right(SPEC, HERE[name](**inputs), inputs, FP32)
    shared = inputs | {"block_table": inputs["block_table"][:1].expand(4, -1).contiguous()}
    assert (inputs["seq_lens"] == 0).any()
    assert_right(SPEC, HERE[name](**shared), shared, FP32)
    assert not HERE[name](**inputs | {"seq_lens": torch.zeros_like(inputs["seq_lens"])}).any()


WINDOWED = [
    (name, queries)
    for name, call in HERE.items()
    for queries, argument in ((1, "window"), (3, "cu_seqlens_q"))
    if {"window", argument} <= inspect.signature(call).parameters.keys()
]
"""Calls that take a window, with one query of a sequence, and with several."""


@pytest.mark.parametrize(("name", "queries"), WINDOWED)
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
        monkeypatch.setattr(library, "ONE_CALL_ELEMENTS", limit)
        torch.testing.assert_close(HERE[name](**inputs).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.needs("C++ compiler")
def test_parts_of_a_long_sequence_on_several_threads_are_added_up(threads):
    inputs = _inputs(B=1, context=1100)
    threads(3)
    assert_right(SPEC, HERE["native"](**inputs), inputs, FP32)


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
    found = [emulated(kernel, **rest, k_cache=x, v_cache=x)[0] for x in (far, far.contiguous())]
    assert torch.equal(*found)


def test_the_reference_takes_several_queries_of_a_sequence():
    inputs = _inputs(B=2, context=20, H=4, H_kv=2)
    k, v = (inputs[name][inputs["block_table"][:, :2].long()].flatten(1, 2)[:, :20] for name in ("k_cache", "v_cache"))
    q = torch.randn(2, 3, 4, 64)
    out = SPEC.reference(**inputs | {"q": q.flatten(0, 1)}, cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32))
    assert torch.allclose(out, DENSE.reference(q, k, v, causal=True).flatten(0, 1), rtol=0, atol=1e-12)


def test_inputs_have_shuffled_pages_and_poison_wherever_no_token_lies():
    inputs = _inputs(B=3, context=100, ragged=True)
    pages = inputs["block_table"][0, :7]
    assert pages.tolist() != sorted(pages.tolist()) and (inputs["block_table"][:, -1] == -1).all()
    assert inputs["seq_lens"][0] == 100 and inputs["seq_lens"][1] == 0
    owned = int(inputs["seq_lens"].sum())
    assert int((~inputs["v_cache"].isnan().any(-1).any(-1)).sum()) == owned


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}, {"return_lse": True}], ids=str)
def test_flash_attention_3_is_given_pages_and_options(options, monkeypatch):
    def kvcache(q, *caches, cache_seqlens, page_table, softmax_scale, causal, window_size, softcap, return_softmax_lse):
        """`flash_attn_with_kvcache` of the package, by the naive kernel."""
        assert causal and q.shape[1] == 1 and window_size[1] in (-1, 0)
        window = None if window_size[0] < 0 else window_size[0] + 1
        pages, more = (*caches, page_table, cache_seqlens), {"window": window, "softcap": softcap or None}
        out, lse = naive.naive(q[:, 0], *pages, softmax_scale, return_lse=True, **more)
        return (out[:, None], lse[:, :, None]) if return_softmax_lse else out[:, None]

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_with_kvcache=kvcache))
    inputs = _inputs(B=3, context=50, H=6, ragged=True, scheme=get_scheme("bf16")) | options
    found = get_kernel("paged_attention", "flash_attention_3").fn(**inputs)
    assert_right(SPEC, found, inputs, get_scheme("bf16"))
