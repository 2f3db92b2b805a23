"""Guards of what page tables, slots and positions hold: asked for, since they wait for the device."""

import pytest
import torch
from op_kernels import CPU

from rooflab.kernels import _checks
from rooflab.kernels.mla_decode import naive as latents
from rooflab.kernels.paged_attention import chunked
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case


def given(**changes):
    case = Case(B=2, context=20, H=2, H_kv=1, D=16, block_size=8, ragged=False, queries=3)
    inputs = get_op("paged_attention").make_inputs(case, SCHEMES["fp32"], CPU, 0)
    for name, (index, value) in changes.items():
        inputs[name][index] = value
    return inputs


def test_what_lies_out_of_place_is_named(monkeypatch):
    for change, message in [
        ({"seq_lens": (1, 33)}, r"seq_lens: expected 0 to 32, which block_table has room for, got \[20, 33\]"),
        ({"seq_lens": (0, -1)}, "seq_lens: expected 0 to 32"),
        ({"block_table": ((1, 2), 9)}, "block_table: expected pages below 9 up to each length, got 9"),
        ({"block_table": ((0, 0), -1)}, "block_table: expected pages below 9 up to each length, got -1"),
        ({"cu_seqlens_q": (2, 7)}, r"cu_seqlens_q: expected bounds that rise from 0 to q's 6, got \[0, 3, 7\]"),
        ({"cu_seqlens_q": (2, 5)}, "cu_seqlens_q: expected bounds that rise"),
        ({"cu_seqlens_q": (1, 7)}, "cu_seqlens_q: expected bounds that rise"),
        ({"cu_seqlens_q": (0, 1)}, "cu_seqlens_q: expected bounds that rise"),
    ]:
        monkeypatch.setattr(_checks, "CHECK_VALUES", True)
        with pytest.raises(ValueError, match=message):
            chunked.paged_attention(**given(**change))


def test_what_no_query_sees_may_be_anything(monkeypatch):
    monkeypatch.setattr(_checks, "CHECK_VALUES", True)
    for change in ({}, {"block_table": ((0, 3), -1)}):
        chunked.paged_attention(**given(**change))
    idle = given(block_table=((1, 0), -1), cu_seqlens_q=(2, 3))
    chunked.paged_attention(**idle | {"q": idle["q"][:3]})
    freed = given(block_table=((0, 0), -1))
    chunked.paged_attention(**freed, window=10)
    with pytest.raises(ValueError, match="block_table: expected pages"):
        chunked.paged_attention(**freed, window=11)


def test_latents_pages_too_and_nothing_unless_it_is_asked_for(monkeypatch):
    case = Case.parse("B=2,context=20,H=2,latent=32,rotary=16,block_size=8,ragged=false")
    inputs = get_op("mla_decode").make_inputs(case, SCHEMES["fp16"], CPU, 0)
    inputs["block_table"][0, 3] = 99
    found = latents.mla_decode(**inputs)
    monkeypatch.setattr(_checks, "CHECK_VALUES", True)
    assert torch.equal(latents.mla_decode(**inputs), found)
    inputs["block_table"][0, 0] = 99
    with pytest.raises(ValueError, match="block_table: expected pages below 9 up to each length, got 99"):
        latents.mla_decode(**inputs)


def test_slots_and_positions_out_of_place_are_named(monkeypatch):
    for op, name, value, message in [
        ("kv_cache_write", "slot_mapping", 12, "slot_mapping: expected values from -1 to 11, got .* to 12"),
        ("rope_and_cache", "slot_mapping", -2, "slot_mapping: expected values from -1 to 11, got -2 to "),
        ("rope_and_cache", "positions", 50, "positions: expected values from 0 to 49, got .* to 50"),
        ("rope_and_cache", "positions", -1, "positions: expected values from 0 to 49, got -1 to "),
    ]:
        sizes = "T=6,H_kv=2,D=16,num_blocks=3,block_size=4,skipped=0"
        if op == "rope_and_cache":
            sizes = (
                "T=6,H=4,H_kv=2,D=16,rotary=16,max_position=50,num_blocks=3,block_size=4,skipped=0,interleaved=false"
            )
        inputs = get_op(op).make_inputs(Case.parse(sizes), SCHEMES["fp32"], CPU, 0)
        inputs[name][1] = value
        monkeypatch.setattr(_checks, "CHECK_VALUES", True)
        with pytest.raises(ValueError, match=message):
            get_kernel(op, "naive").fn(**inputs)
