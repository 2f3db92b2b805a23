"""Guards of what page tables, slots, positions, ids and offsets hold: of references always, of kernels where asked."""

import pytest
import torch
from op_kernels import CPU

from rooflab.bench.compile.pretended import pretended_gpu
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


def test_what_lies_out_of_place_is_named():
    for change, message in [
        ({"seq_lens": (1, 33)}, r"seq_lens: expected 0 to 32, which block_table has room for, got \[20, 33\]"),
        ({"seq_lens": (0, -1)}, "seq_lens: expected 0 to 32"),
        ({"block_table": ((1, 2), 9)}, "block_table: expected pages below 9 up to each length, got 9"),
        ({"block_table": ((0, 0), -1)}, "block_table: expected pages below 9 up to each length, got -1"),
        ({"cu_seqlens_q": (2, 7)}, r"cu_seqlens_q: expected offsets from 0 to 6 that never fall, got \[0, 3, 7\]"),
        ({"cu_seqlens_q": (2, 5)}, "cu_seqlens_q: expected offsets from 0"),
        ({"cu_seqlens_q": (1, 7)}, "cu_seqlens_q: expected offsets from 0"),
        ({"cu_seqlens_q": (0, 1)}, "cu_seqlens_q: expected offsets from 0"),
    ]:
        for call in (chunked.chunked, get_op("paged_attention").reference):
            with pytest.raises(ValueError, match=message):
                call(**given(**change))


def test_what_no_query_sees_may_be_anything():
    for change in ({}, {"block_table": ((0, 3), -1)}):
        chunked.chunked(**given(**change))
    idle = given(block_table=((1, 0), -1), cu_seqlens_q=(2, 3))
    chunked.chunked(**idle | {"q": idle["q"][:3]})
    freed = given(block_table=((0, 0), -1))
    chunked.chunked(**freed, window=10)
    with pytest.raises(ValueError, match="block_table: expected pages"):
        chunked.chunked(**freed, window=11)


def test_latents_pages_too():
    case = Case.parse("B=2,context=20,H=2,latent=32,rotary=16,block_size=8,ragged=false")
    inputs = get_op("mla_decode").make_inputs(case, SCHEMES["fp16"], CPU, 0)
    inputs["block_table"][0, 3] = 99
    latents.naive(**inputs)
    inputs["block_table"][0, 0] = 99
    for call in (latents.naive, get_op("mla_decode").reference):
        with pytest.raises(ValueError, match="block_table: expected pages below 9 up to each length, got 99"):
            call(**inputs)


def test_nothing_is_read_on_a_gpu_unless_it_is_asked_for(monkeypatch):
    table = torch.zeros(1, 1, dtype=torch.int32)
    for asked in (False, True):
        monkeypatch.setattr(_checks, "CHECK_VALUES", asked)
        assert _checks.checks_bounds(table) and not _checks.checks_values(table.to("meta"))
        with pretended_gpu():
            assert _checks.checks_bounds(table) is asked and _checks.checks_values(table) is asked


PLACES = {
    "kv_cache_write": "T=6,H_kv=2,D=16,num_blocks=3,block_size=4,skipped=0",
    "rope_and_cache": "T=6,H=4,H_kv=2,D=16,rotary=16,max_position=50,num_blocks=3,block_size=4,skipped=0,"
    "interleaved=false",
    "rope": "T=6,H=4,H_kv=2,D=16,max_position=50,interleaved=false",
    "embedding": "T=6,V=50,H=16",
    "gemm_grouped": "T=6,top_k=1,E=3,N=8,K=8,skew=0.0",
}


@pytest.mark.parametrize(
    ("op", "name", "index", "value", "message"),
    [
        ("kv_cache_write", "slot_mapping", 1, 12, "expected values from -1 to 11, got .* to 12"),
        ("kv_cache_write", "slot_mapping", slice(2), 3, "expected each slot at most once, got 3 again"),
        ("rope_and_cache", "slot_mapping", 1, -2, "expected values from -1 to 11, got -2 to "),
        ("rope_and_cache", "slot_mapping", slice(2), 3, "expected each slot at most once, got 3 again"),
        ("rope_and_cache", "positions", 1, 50, "expected values from 0 to 49, got .* to 50"),
        ("rope_and_cache", "positions", 1, -1, "expected values from 0 to 49, got -1 to "),
        ("rope", "positions", 1, -1, "expected values from 0 to 49, got -1 to "),
        ("rope", "positions", 1, 50, "expected values from 0 to 49, got .* to 50"),
        ("embedding", "token_ids", 1, -1, "expected values from 0 to 49, got -1 to "),
        ("gemm_grouped", "offsets", 3, 5, r"expected offsets from 0 to 6 that never fall, got \[0, .*, 5\]"),
        ("gemm_grouped", "offsets", 0, 1, "expected offsets from 0 to 6 that never fall"),
        ("gemm_grouped", "offsets", 1, 7, "expected offsets from 0 to 6 that never fall"),
    ],
)
def test_a_kernel_that_is_asked_to_and_the_reference_always_name_what_is_out_of_place(
    monkeypatch, op, name, index, value, message
):
    inputs = get_op(op).make_inputs(Case.parse(PLACES[op]), SCHEMES["fp32"], CPU, 0)
    inputs[name][index] = value
    monkeypatch.setattr(_checks, "CHECK_VALUES", True)
    for call in (get_op(op).reference, get_kernel(op, "naive").fn):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            call(**inputs)
