"""What orders, races and counts to other CTAs and proxies: strong loads, scopes, atomics, the fences by their kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx_cuda import BOTH_ORDERS, run

ORDERS = pytest.mark.parametrize("seed", BOTH_ORDERS)
FENCE = '-DFENCE="fence.proxy.async;"'


def integers(count: int) -> torch.Tensor:
    """0, 1, 2 and so on."""
    return torch.arange(count, dtype=torch.int32)


def races(name: str, args: list[Any], *options: str, **more: Any) -> tuple[str, ...]:
    """What is reported of a kernel of the file."""
    return run("scopes", name, args, block=32, options=(FENCE, *(options or ("-DOWN=0",))), **more).races


@ORDERS
def test_two_loads_do_not_race_however_strong_one_of_them_is(seed: int) -> None:
    assert races("plain_and_strong_load", [integers(32), integers(64)], grid=(2,), seed=seed) == ()


@ORDERS
def test_a_load_of_a_flag_releases_nothing(seed: int) -> None:
    found = races("load_as_release", [integers(1), integers(1), integers(2)], grid=(2,), seed=seed)
    assert len(found) == 1 and "byte 0 of load_as_release_param_0" in found[0]


@ORDERS
def test_atomics_of_the_scope_of_a_cta_race_with_those_of_another(seed: int) -> None:
    found = races("counts_within_a_cta", [integers(2)], "-DOWN=0", grid=(2,), seed=seed)
    assert len(found) == 1 and "write-write race on global memory" in found[0]
    assert races("counts_within_a_cta", [integers(2)], "-DOWN=1", grid=(2,), seed=seed) == ()


@ORDERS
def test_loads_and_stores_of_the_scope_of_a_cta_race_with_those_of_another(seed: int) -> None:
    found = races("reads_within_a_cta", [integers(1), integers(2)], grid=(2,), seed=seed)
    assert len(found) == 1 and "race on global memory, byte 0 of reads_within_a_cta_param_0" in found[0]


def test_atomics_move_what_they_change() -> None:
    bins = torch.zeros(32, dtype=torch.int32)
    found = run("scopes", "histogram", [integers(32), bins], block=32, grid=(3,), options=(FENCE, "-DOWN=0"))
    assert torch.equal(bins, torch.full((32,), 3, dtype=torch.int32))
    moved = found.bytes
    assert moved.atomic == 3 * 32 * 4
    assert moved.hbm_read == 2 * 128 and moved.hbm_write == 128, "each sector once"
    assert moved.shared_read == 3 * 2 * 128 and moved.shared_write == 3 * 2 * 128


@pytest.mark.parametrize(
    ("fence", "misses"),
    [("fence.proxy.async;", False), ("fence.proxy.async.shared::cta;", False),
     ("fence.mbarrier_init.release.cluster;", True), ("fence.proxy.async.global;", True)],
)  # fmt: skip
def test_only_a_proxy_fence_orders_stores_before_a_bulk_copy(fence: str, misses: bool) -> None:
    options = (f'-DFENCE="{fence}"', "-DOWN=0")
    found = run("scopes", "stores_behind_a_fence", [integers(32)], block=32, options=options).races
    assert any("with no fence.proxy.async between" in race for race in found) == misses
    assert bool(found) == misses
