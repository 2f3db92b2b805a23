"""Warps whose lanes part, meet, shuffle and vote, against plain Python."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from ptx_cuda import BOTH_ORDERS, run

Ints = npt.NDArray[np.int32]
THREADS = 128


@pytest.fixture
def x() -> Ints:
    """(128,) int32, positive."""
    return np.random.default_rng(5).integers(1, 60, THREADS).astype(np.int32)


def emulated(name: str, x: Ints, shape: tuple[int, ...] = (THREADS,), seed: int = 0) -> Ints:
    """What a kernel without races makes of `x`."""
    y = np.full(shape, -12345, np.int32)
    assert run("divergence", name, [x, y], seed=seed).races == ()
    return y


@pytest.mark.parametrize("n", [128, 100, 64, 33, 1])
def test_threads_that_return_early_are_not_waited_for(x: Ints, n: int) -> None:
    y = np.zeros(1, np.int32)
    result = run("divergence", "early_return", [x, y, n])
    assert result.races == () and y[0] == x[:n].sum()


def test_loops_within_loops_with_continue_and_return(x: Ints) -> None:
    def one(v: int, lane: int) -> int:
        for a in range(lane % 4):
            b = 0
            while b < v % 3:
                if not (a + b) & 1:
                    v += b + 1
                    if v > 100:
                        return v - 100
                b += 1
            v += 2
        return v

    assert emulated("nested", x).tolist() == [one(int(v), i % 32) for i, v in enumerate(x)]


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_syncwarp_orders_the_lanes_of_a_warp(seed: int) -> None:
    box = np.arange(THREADS) % 32
    for _ in range(5):
        v = np.where(box * 0 + np.arange(THREADS) & 1, np.roll(box, 1) + 1, np.roll(box, -1) * 2)
        box = np.where(np.arange(THREADS) % 32 < 16, v, v + 1)
    y = np.zeros(THREADS, np.int32)
    assert run("divergence", "sync_warp", [y], seed=seed).races == ()
    assert (y == box).all()


def test_halves_of_a_warp_shuffle_by_themselves(x: Ints) -> None:
    halves = x.reshape(-1, 2, 16)
    want = np.empty_like(halves)
    want[:, 0] = halves[:, 0].sum(axis=1, keepdims=True)
    up = np.concatenate([halves[:, 1, :1], halves[:, 1, :-1]], axis=1)
    want[:, 1] = up - up[:, 5:6]
    assert (emulated("partial_shuffles", x) == want.ravel()).all()


def test_votes_and_matches_see_the_whole_warp(x: Ints) -> None:
    y = emulated("votes", x, shape=(THREADS, 4)).view(np.uint32)
    for i in range(THREADS):
        warp = x[i // 32 * 32 :][:32]
        same = sum(1 << k for k, v in enumerate(warp) if v % 5 == x[i] % 5)
        want = [sum(1 << k for k, v in enumerate(warp) if v > 0), int((warp == 7).any()), int((warp < 40).all()), same]
        assert y[i].tolist() == want


def test_one_instruction_reduces_over_several_masks_of_a_warp(x: Ints) -> None:
    keys = np.random.default_rng(1).integers(0, 4, THREADS).astype(np.int32)
    y = np.zeros((THREADS, 5), np.int32)
    assert run("divergence", "keyed_reductions", [keys, x, y]).races == ()
    for i in range(THREADS):
        own = slice(i // 32 * 32, i // 32 * 32 + 32)
        mine = x[own][keys[own] == keys[i]]
        want = [mine.sum(), mine.min(), mine.max(), np.bitwise_xor.reduce(mine), mine[0] + (mine & 1).sum()]
        assert y[i].tolist() == want


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_lane_may_wait_for_another_lane_of_its_warp(seed: int) -> None:
    flags, y = np.zeros(4, np.int32), np.zeros(THREADS, np.int32)
    run("divergence", "spin_within_a_warp", [flags, y], seed=seed)
    assert (y == 42 + np.arange(THREADS) // 32).all()


@pytest.mark.parametrize("mask", [0b0011, 0b0101, 0b1000])
def test_a_product_in_flight_reaches_warps_that_parted_and_met(mask: int) -> None:
    y, counts = np.zeros(4 * THREADS, np.float32), np.zeros(THREADS, np.int32)
    assert run("divergence", "around_a_product", [y, counts, mask]).races == ()
    assert (y == 16).all()
    assert counts.tolist() == [7 * (mask >> i // 32 & 1) for i in range(THREADS)]
