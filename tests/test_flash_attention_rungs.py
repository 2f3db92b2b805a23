"""The Triton rungs of flash_attention over online: mask edges, options, views, refusals, tiles, and what they need."""

from __future__ import annotations

import math
import re

import pytest
import torch
from compiled_sizes import assert_is_its_footprint, compiled
from test_ptx_mutants import asked

from rooflab.bench.compile.static import Request
from rooflab.kernels.configs import legal_configs
from rooflab.kernels.flash_attention import masked_tiles, packed_gqa, persistent, tma
from rooflab.kernels.flash_attention._maps import why_not_loaded
from rooflab.kernels.registry import get_kernel
from rooflab.reference.flash_attention import SPEC, reference
from rooflab.reference.spec import SCHEMES, Case

RUNGS = {module.__name__.split(".")[-1]: module for module in (masked_tiles, tma, packed_gqa, persistent)}
BY_TMA = ("tma", "packed_gqa", "persistent")
SMALL = {
    "masked_tiles": masked_tiles.Config(16, 16, 4, 1),
    "tma": tma.Config(64, 32, 4, 2),
    "packed_gqa": packed_gqa.Config(64, 32, 4, 2),
    "persistent": persistent.Config(64, 32, 4, 2, 1),
}
CPU = torch.device("cpu")
BF16 = SCHEMES["bf16"]


def _inputs(T=5, S=9, H=4, H_kv=2, D=16, B=1, causal=True, scheme="fp16", **more):
    return SPEC.make_inputs(Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal, **more), SCHEMES[scheme], CPU, 0)


def _passes(found, inputs, scheme="fp16"):
    found = found if isinstance(found, tuple) else (found,)
    return all(error.passed for error in SPEC.judge(found, SPEC.oracle(inputs), inputs, SCHEMES[scheme]))


@pytest.mark.parametrize(("T", "S"), [(1, 15), (16, 16), (17, 33), (33, 64), (40, 31), (50, 3)])
@pytest.mark.parametrize("window", [0, 1, 15, 16, 17, 40])
def test_every_cut_of_a_tile_is_masked(T, S, window):
    """Of 16 by 16 tiles: the diagonal, both ends, windows narrower and wider than a tile and than all keys."""
    inputs = _inputs(T, S, H=1, H_kv=1, scheme="fp32", window=window, lse=True)
    assert _passes(masked_tiles.flash_attention(**inputs, config=SMALL["masked_tiles"]), inputs, "fp32")


@pytest.mark.parametrize("name", BY_TMA)
def test_tiles_by_tma(name):
    for options in [
        {"T": 70, "S": 100, "window": 33, "lse": True},
        {"T": 70, "S": 40, "lse": True, "sinks": True},
        {"T": 20, "S": 97, "causal": False, "softcap": 5.0, "B": 2},
        {"T": 33, "S": 65, "H": 7, "H_kv": 1, "D": 40, "window": 1},
        {"T": 3, "S": 65, "H": 6, "H_kv": 2, "softcap": 3.0, "sinks": True, "window": 40, "lse": True},
    ]:
        inputs = _inputs(**options)
        assert _passes(RUNGS[name].flash_attention(**inputs, config=SMALL[name]), inputs)


@pytest.mark.parametrize("name", RUNGS)
def test_keys_before_every_window_and_past_the_end_are_never_heard(name):
    whole = _inputs(T=20, S=75, window=30)
    inputs = whole | {"k": whole["k"][:, :70], "v": whole["v"][:, :70]}
    plain = RUNGS[name].flash_attention(**inputs, config=SMALL[name])
    assert _passes(plain, inputs)
    for x in ("k", "v"):
        whole[x][:, :21] = math.nan  # the first query, at key 50, sees 30 back from there
        whole[x][:, 70:] = math.nan
    assert torch.equal(RUNGS[name].flash_attention(**inputs, config=SMALL[name]), plain)


def _wide(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("name", BY_TMA)
def test_what_tma_cannot_take_is_said(name):
    for change, message in [
        ({x: _wide(1, 5, 2, 64, dtype=torch.float32) for x in "qkv"}, "q: expected torch.float16 or .*masked_tiles"),
        ({x: _wide(1, 5, 2, 60) for x in "qkv"}, "q: expected a head_dim of whole 16 bytes from 16 to 256, got 60"),
        ({x: _wide(1, 5, 2, 264) for x in "qkv"}, "q: expected a head_dim of whole 16 bytes from 16 to 256, got 264"),
        ({"k": _wide(1, 9, 2, 20)[..., :16]}, "k: expected an address and strides of whole 16 bytes .* 80, 40 bytes"),
        ({"v": _wide(1, 9, 1, 16).expand(1, 9, 2, 16)}, "v: expected an address and strides .*masked_tiles takes any"),
    ]:
        inputs = _inputs() | change
        reason = get_kernel("flash_attention", name).why_not_args(inputs).reason
        assert re.search(message, reason) and "\n" not in reason
        with pytest.raises(ValueError, match=message):
            RUNGS[name].flash_attention(**inputs)


def test_queries_by_pointers_may_lie_anywhere():
    odd = torch.randn(1, 5, 4, 17).half()[..., 1:]
    assert "q: expected an address" in str(why_not_loaded(odd, _wide(1, 9, 2, 16), _wide(1, 9, 2, 16)))
    inputs = _inputs() | {"q": odd}
    for name in ("packed_gqa", "masked_tiles"):
        assert _passes(RUNGS[name].flash_attention(**inputs, config=SMALL[name]), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tiles_m", "heads", "section", "ctas"), [(2, 1, 1, 132), (8, 5, 2, 7), (16, 96, 7, 132)])
def test_every_tile_is_somebodys_once_and_work_is_shared(tiles_m, heads, section, ctas, causal):
    turns = -(-tiles_m * heads // ctas)
    found = [
        [
            persistent.place.fn(tile, tiles_m, heads, section, causal)
            for turn in range(turns)
            if (tile := persistent.nth_tile.fn(turn, cta, ctas)) < tiles_m * heads
        ]
        for cta in range(ctas)
    ]
    assert sorted(sum(found, [])) == [(m, h) for m in range(tiles_m) for h in range(heads)]
    work = [sum(m + 1 if causal else 1 for m, _ in tiles) for tiles in found]
    assert max(work) - min(work) <= 1.5 * tiles_m


@pytest.mark.parametrize(
    ("name", "case", "config", "sms"),
    [
        ("persistent", "B=1,T=130,S=200,H=1,H_kv=1,D=64,causal=true,window=100",
         {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 1}, 1),
        pytest.param("packed_gqa", "B=1,T=20,S=230,H=3,H_kv=1,D=64,causal=true",
                     {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 3}, 132, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_no_race_whatever_the_order_of_warps(name, case, config, sms):
    """Round the pipeline several times; a CTA of the persistent rung goes on to its next tile."""
    request = {"op": "flash_attention", "kernel": name, "cases": [case], "scheme": "bf16", "config": config}
    assert asked({**request, "sms": sms, "seeds": [], "clean_seeds": [0, 1], "only": []}) == {
        "clean": [],
        "mutants": [],
    }


@pytest.mark.parametrize(
    "heads",
    [
        [("persistent", 64)],
        pytest.param([*((name, 128) for name in RUNGS), ("persistent", 256)], marks=pytest.mark.slow),
    ],
)
def test_nothing_spills_in_a_loop_over_keys_and_a_cta_needs_what_its_footprint_says(heads):
    requests = [
        Request("flash_attention", name, Case(B=1, T=2048, S=2048, H=8, H_kv=2, D=D, causal=True), BF16)
        for name, D in heads
    ]
    for request, info in compiled(requests):
        assert_is_its_footprint(request, info)
        if request.case["D"] == 64:
            assert info.registers <= 128, "two CTAs an SM"


@pytest.mark.parametrize(
    "name",
    [
        "flash_attention/persistent",
        "flash_attention_varlen/online",
        *(
            pytest.param(f"flash_attention/{name}", marks=pytest.mark.slow)
            for name in ("masked_tiles", "online", "packed_gqa", "tma", "ping_pong")
        ),
    ],
)
def test_one_code_serves_every_length(name):
    """Lengths of 1, of whole 16s and odd ones are not compiled anew; the launcher's own choices may differ by them."""
    op, name = name.split("/")
    config = get_kernel(op, name).tuning.heuristic(Case(B=1, T=64, S=64, H=3, H_kv=1, D=64), BF16)
    more = {} if name == "online" else {"lse": True}
    cases = [Case(B=B, T=T, S=S, H=3, H_kv=1, D=64, causal=True, **more) for B, T, S in ((1, 1, 33), (16, 2048, 2048))]
    found = compiled([Request(op, name, case, BF16, config=config) for case in cases])
    assert len({info.code_hash for _, info in found}) == 1


@pytest.mark.parametrize("name", RUNGS)
def test_the_heuristic_is_legal_for_every_head(name):
    kernel = get_kernel("flash_attention", name)
    for D in (64, 80, 96, 128, 192, 256):
        for scheme in ("bf16", "fp32") if name == "masked_tiles" else ("bf16",):
            for T in (1, 4096):
                case = Case(B=1, T=T, S=4096, H=32, H_kv=8, D=D, causal=True)
                assert kernel.tuning.heuristic(case, SCHEMES[scheme]) in legal_configs(kernel, case, SCHEMES[scheme])


def test_a_window_that_reaches_no_further_than_all_keys_moves_less():
    inputs = _inputs(T=10, S=100)
    moved = lambda window: get_kernel("flash_attention", "masked_tiles").traffic_of({**inputs, "window": window}).bytes
    assert moved(11) < moved(None) == moved(500)
    assert torch.equal(reference(**inputs, window=500), reference(**inputs))
    found = masked_tiles.flash_attention(**inputs, window=2**40, config=SMALL["masked_tiles"])
    assert torch.equal(found, masked_tiles.flash_attention(**inputs, config=SMALL["masked_tiles"]))
