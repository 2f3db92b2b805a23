"""The rungs of flash_attention above online: mask edges, ignored keys, tiles, and one code for every length."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from compiled_sizes import compiled
from op_kernels import CPU, assert_right, slow
from test_flash_attention import SMALL

from rooflab.bench.compile.cases import KernelCase
from rooflab.kernels.flash_attention import masked_tiles, packed_gqa, persistent, tma
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.flash_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case

RUNGS = {module.__name__.split(".")[-1]: module for module in (masked_tiles, tma, packed_gqa, persistent)}
BF16 = SCHEMES["bf16"]


def _inputs(T=5, S=9, H=4, H_kv=2, D=16, B=1, causal=True, scheme="fp16", **more):
    return SPEC.make_inputs(Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal, **more), SCHEMES[scheme], CPU, 0)


def _right(name, inputs, scheme="fp16"):
    """What the rung gives in small tiles, once it is judged."""
    found = getattr(RUNGS[name], name)(**inputs, config=SMALL[name])
    assert_right(SPEC, found, inputs, SCHEMES[scheme])
    return found


@pytest.mark.parametrize(("T", "S"), [(1, 15), (16, 16), (17, 33), (33, 64), (40, 31), (50, 3)])
@pytest.mark.parametrize("window", [0, 1, 15, 16, 17, 40])
def test_every_cut_of_a_tile_is_masked(T, S, window):
    """Of 16 by 16 tiles: the diagonal, both ends, windows narrower and wider than a tile and than all keys."""
    inputs = _inputs(T, S, H=1, H_kv=1, scheme="fp32", window=window, lse=True)
    _right("masked_tiles", inputs, "fp32")


@pytest.mark.parametrize("name", RUNGS)
def test_keys_before_every_window_and_past_the_end_are_never_heard(name):
    whole = _inputs(T=20, S=75, window=30)
    inputs = whole | {"k": whole["k"][:, :70], "v": whole["v"][:, :70]}
    plain = _right(name, inputs)
    for x in ("k", "v"):
        whole[x][:, :21] = math.nan  # the first query, at key 50, sees 30 back from there
        whole[x][:, 70:] = math.nan
    assert torch.equal(getattr(RUNGS[name], name)(**inputs, config=SMALL[name]), plain)


@pytest.mark.parametrize("name", ["packed_gqa", "masked_tiles"])
def test_queries_by_pointers_may_lie_anywhere_and_a_window_may_be_wider_than_32_bits(name):
    inputs = _inputs() | {"q": torch.randn(1, 5, 4, 17).half()[..., 1:]}
    assert torch.equal(_right(name, inputs | {"window": 2**40}), _right(name, inputs))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("tiles_m", "heads", "section", "ctas"), [(2, 1, 1, 132), (8, 5, 2, 7), (16, 96, 7, 132), (5, 144, 132, 132)]
)
def test_every_tile_is_somebodys_once_and_work_is_shared(tiles_m, heads, section, ctas, causal):
    found = [[] for _ in range(ctas)]
    for cta, tiles in enumerate(found):
        turns = [persistent.nth_tile.fn(turn, cta, ctas) for turn in range(-(-tiles_m * heads // ctas))]
        taken = [tile for tile in turns if tile < tiles_m * heads]
        tiles += [persistent.place.fn(tile, tiles_m, heads, section, causal) for tile in taken]
    assert sorted(chain(*found)) == [(m, h) for m in range(tiles_m) for h in range(heads)]
    work = [sum(m + 1 if causal else 1 for m, _ in tiles) for tiles in found]
    assert max(work) - min(work) <= 1.5 * tiles_m


DENSE = [Case(B=B, T=T, S=S, H=3, H_kv=1, D=64, causal=True) for B, T, S in ((1, 1, 33), (16, 2048, 2048))]
PAGED = [
    Case(B=B, context=S, H=3, H_kv=1, D=64, block_size=16, ragged=False, queries=T, window=window)
    for B, T, S, window in ((1, 3, 16, 1), (16, 32, 2048, 33))
]


@pytest.mark.more
@pytest.mark.parametrize(
    ("op", "name", "cases"),
    [
        ("flash_attention", "persistent", DENSE),
        ("flash_attention_varlen", "online", DENSE),
        *(slow("flash_attention", name, DENSE) for name in "masked_tiles online packed_gqa tma ping_pong".split()),
        ("paged_attention", "chunked", PAGED),
        ("paged_attention", "tma_pages", PAGED),
    ],
)
def test_one_code_serves_every_length(op, name, cases):
    """Lengths of 1, of whole 16s and odd ones, tables and windows are not compiled anew; the launcher's own choices may
    differ by them."""
    config = get_kernel(op, name).tuning.heuristic(cases[0].but(T=64, S=64, queries=64), BF16)
    found = compiled([KernelCase(op, name, get_op(op).check_case(case), BF16, config=config) for case in cases])
    assert len({info.code_hash for _, info in found}) == 1
