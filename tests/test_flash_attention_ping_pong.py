"""flash_attention/ping_pong: what it refuses, how it lays its tiles over SMs, views and rings in the emulator, and what
its code needs."""

from __future__ import annotations

import re

import pytest
import torch
from compiled_sizes import assert_is_its_footprint, compiled
from op_kernels import python_without_interpreter, refuses
from test_ptx_mutants import asked

from rooflab.bench.compile.static import Request
from rooflab.kernels.configs import legal_configs
from rooflab.kernels.flash_attention import _ping_pong_softmax as device
from rooflab.kernels.flash_attention import ping_pong
from rooflab.kernels.flash_attention._tiles import section_heads
from rooflab.kernels.registry import get_kernel
from rooflab.reference.flash_attention import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNEL = get_kernel("flash_attention", "ping_pong")
BF16 = SCHEMES["bf16"]


def _inputs(T=5, S=9, H=4, H_kv=2, D=64, B=1, causal=True):
    case = Case(B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal)
    return SPEC.make_inputs(case, BF16, torch.device("cpu"), 0)


def _wide(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def test_what_tma_and_wgmma_cannot_take_is_said():
    changes = [
        ({name: _wide(1, 5, 2, 64, dtype=torch.float32) for name in "qkv"}, "q: expected torch.float16 or .* online"),
        ({name: _wide(1, 5, 2, 60) for name in "qkv"}, "q: expected a head_dim of whole 16 bytes up to 256, got 60"),
        ({name: _wide(1, 5, 2, 264) for name in "qkv"}, "q: expected a head_dim of whole 16 bytes up to 256, got 264"),
        ({"softmax_scale": -0.5}, "softmax_scale: expected 0 or more, got -0.5; .*online"),
        (
            {"q": _wide(1, 5, 4, 68)[..., 4:]},
            "q: expected an address and strides of whole 16 bytes .*masked_tiles takes any",
        ),
        ({"k": _wide(1, 9, 2, 68)[..., :64]}, "k: expected an address and strides of whole 16 bytes .* 272, 136 bytes"),
        ({"v": _wide(1, 9, 1, 64).expand(1, 9, 2, 64)}, "v: expected an address and strides of whole .* 128, 0 bytes"),
    ]
    for change, message in changes:
        assert re.search(message, KERNEL.why_not_args(_inputs() | change).reason)
    out = ({"out": _wide(1, 5, 4, 68)[..., :64]}, "out: expected an address and strides of whole 16 bytes")
    refuses(ping_pong.flash_attention, _inputs, [*changes, out])


def test_a_stride_that_nothing_is_multiplied_by_may_be_any():
    odd = torch.ones(71, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert KERNEL.why_not_args(_inputs(T=1, S=1, H=1, H_kv=1) | {"q": odd}) is None


def _tiles(T: int, heads: int, section: int, causal: bool = True, ctas: int = 132) -> list[list[tuple[int, int]]]:
    """Of each CTA, its tiles: the device's own arithmetic on Python's integers."""
    tiles_m = -(-T // ping_pong.TILE_M)
    return [
        [
            device.place.fn(device.nth_tile.fn(turn, cta, ctas), tiles_m, heads, section, causal)
            for turn in range(device.count_tiles.fn(tiles_m * heads, cta, ctas))
        ]
        for cta in range(ctas)
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "heads", "section"), [(130, 1, 1), (1000, 5, 2), (2048, 96, 7), (640, 144, 132)])
def test_every_tile_is_somebodys_once(T, heads, section, causal):
    found = [tile for tiles in _tiles(T, heads, section, causal) for tile in tiles]
    assert sorted(found) == [(m, h) for m in range(-(-T // ping_pong.TILE_M)) for h in range(heads)]


@pytest.mark.parametrize(
    ("B", "T", "H", "H_kv"),
    [(1, 4096, 32, 8), (1, 16384, 32, 8), (4, 4096, 32, 8), (32, 512, 16, 16), (16, 1024, 16, 16), (8, 2048, 16, 16),
     (4, 4096, 16, 16), (2, 8192, 16, 16), (1, 16384, 16, 16), (1, 32768, 64, 8), (1, 16384, 64, 64)],
)  # fmt: skip
def test_what_is_masked_leaves_every_cta_the_same_work(B, T, H, H_kv):
    """In blocks of keys: the busiest of 132 has at most 3.2% more than the mean."""
    section = section_heads(torch.empty(B, T, H_kv, 128, dtype=torch.bfloat16, device="meta"), H // H_kv)
    work = [sum(m + 1 for m, _ in tiles) for tiles in _tiles(T, B * H, min(section, B * H))]
    assert max(work) <= 1.032 * sum(work) / len(work)


def test_the_longest_tiles_come_first_and_a_section_stays_together():
    first = [tiles[0] for tiles in _tiles(2048, 32, 32)]
    assert {m for m, _ in first[:128]} == {12, 13, 14, 15} and first[0] == (15, 0)
    heads = {h for tiles in _tiles(2048, 64, 8) for _, h in tiles[:1]}
    assert heads == set(range(12)), "8 heads of 16 tiles, and 4 more"


ON_VIEWS = """
import math, torch
from rooflab.bench.compile.cases import DEFAULT
from rooflab.bench.check.emulating import emulation
from rooflab.bench.ptx.launch import emulate
from rooflab.bench.ptx.triton_kernels import bound, in_ctas
from rooflab.bench.ptx.triton_kernels import emulating_triton
from rooflab.kernels.flash_attention import ping_pong
from rooflab.reference.flash_attention import reference

def handle(kernel, grid, args):
    grid = in_ctas(kernel, grid)
    launch, values, reached = bound(kernel, grid, args)
    races = emulate(launch, grid, values, memory=reached).races
    assert not races, races

def judge(out, lse, q, k, v, **options):
    wanted, wanted_lse = reference(q, k, v, return_lse=True, **options)
    assert (out.double() - wanted).abs().max() < 0.02, (out.double() - wanted).abs().max()
    assert lse is None or torch.allclose(lse.double(), wanted_lse, atol=1e-4)

def packed():
    # One projection, an out in a wider buffer, a log-sum-exp across it: what lies beside them stays NaN.
    whole = torch.randn(2, 70, 4 + 2 + 2, 80).bfloat16()
    q, k, v = whole.split((4, 2, 2), dim=2)
    before = whole.clone()
    wide = torch.full((2, 70, 6, 96), math.nan, dtype=torch.bfloat16)
    across = torch.full((4, 2, 71), math.nan)
    out, lse = wide[:, :, 1:5, 8:88], across.permute(1, 2, 0)[:, :70]
    found = ping_pong.flash_attention(q, k, v, True, out=(out, lse), return_lse=True)
    assert found[0] is out and found[1] is lse
    judge(out, lse, q, k, v, causal=True)
    assert torch.equal(whole, before) and across[:, :, 70].isnan().all()
    wide[:, :, 1:5, 8:88] = math.nan
    assert wide.isnan().all()

def poisoned():
    # What lies past the queries, the keys and the head, and in the next sequence's place, is NaN.
    q = torch.full((2, 40, 2, 96), math.nan, dtype=torch.bfloat16)[:, :33, :, :72]
    k, v = (torch.full((2, 80, 1, 96), math.nan, dtype=torch.bfloat16)[:, :70, :, :72] for _ in "kv")
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape))
    judge(ping_pong.flash_attention(q, k, v, False, 0.3), None, q, k, v, causal=False, softmax_scale=0.3)

def alike():
    # A scale of 0: the mean of what is seen.
    q, k, v = (torch.randn(1, 5, 1, 64).bfloat16() for _ in "qkv")
    out, lse = ping_pong.flash_attention(q, k, v, True, 0.0, return_lse=True)
    judge(out, lse, q, k, v, causal=True, softmax_scale=0.0)

def far():
    # Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are.
    k = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((1, 3, 1, 64), (2**32, 2**30, 64, 1))
    k.copy_(torch.randn(1, 3, 1, 64))
    q = torch.randn(1, 2, 1, 64).bfloat16()
    judge(ping_pong.flash_attention(q, k, k), None, q, k, k)

def still():
    # Blocks go from the last key to the first: the peak comes first and stands still over 127 more, whose sum is
    # that of the first block and must not drift.
    q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 2**14, 1, 64)
    q[..., 0], k[0, -1, 0, 0] = 35.0, 15.0
    _, lse = ping_pong.flash_attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), return_lse=True)
    assert abs(lse.item() - 35 * 15 / 8) < 2e-5, lse.item()

def wide():
    # A window of more keys than there are hides nothing, however many.
    q, k, v = (torch.randn(1, 5, 1, 64).bfloat16() for _ in "qkv")
    plain = ping_pong.flash_attention(q, k, v, True)
    assert torch.equal(ping_pong.flash_attention(q, k, v, True, window=2**40), plain)

with emulation(), emulating_triton(DEFAULT.sm, DEFAULT.properties(), handle):
    torch.manual_seed(0)
    for check in (packed, poisoned, alike, far, still, wide):
        check()
"""


def test_views_poison_beside_them_a_scale_of_0_and_rows_far_apart():
    python_without_interpreter("-c", ON_VIEWS)


@pytest.mark.parametrize(
    ("case", "scheme", "config"),
    [
        ("B=1,T=140,S=330,H=2,H_kv=1,D=64,causal=true,lse=true", "bf16", {"block_n": 64, "stages": 2}),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                ("B=2,T=60,S=200,H=2,H_kv=2,D=256,causal=false", "fp16", {"block_n": 64, "stages": 2}),
                (
                    "B=1,T=200,S=300,H=1,H_kv=1,D=64,causal=true,window=90,softcap=20.0,sinks=true",
                    "bf16",
                    {"block_n": 64, "stages": 3},
                ),
            )
        ),
    ],
)
def test_a_cta_goes_from_tile_to_tile_without_a_race(case, scheme, config):
    """All tiles on one SM, the rings round several times, in the order of the program and in a drawn one."""
    request = {"op": "flash_attention", "kernel": "ping_pong", "cases": [case], "scheme": scheme, "config": config}
    assert asked({**request, "sms": 1, "seeds": [], "clean_seeds": [0, 1], "only": []}) == {"clean": [], "mutants": []}


def test_nothing_spills_in_a_loop_and_a_cta_needs_what_its_footprint_says():
    requests = [
        Request("flash_attention", "ping_pong", Case(B=1, T=2048, S=2048, H=32, H_kv=8, D=D, causal=causal), BF16)
        for D, causal in ((128, True), (256, False))
    ]
    for request, info in compiled(requests):
        assert_is_its_footprint(request, info)
        assert info.registers == 168


def test_configs_are_what_a_consumer_can_hold():
    case = Case(B=1, T=512, S=512, H=8, H_kv=2, D=128, causal=True)
    legal = lambda D: {(c.block_n, c.stages) for c in legal_configs(KERNEL, case.but(D=D), BF16)}
    assert legal(64) == {(n, s) for n in (64, 128) for s in (2, 3, 4, 5)}
    assert legal(128) == {(64, 2), (64, 3), (64, 4), (64, 5), (128, 2)} and legal(256) == {(64, 2)}
    assert ping_pong.heuristic(case.but(D=192)) == ping_pong.Config(64, 2)
