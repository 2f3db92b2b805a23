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


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_syncwarp_orders_the_lanes_of_a_warp(seed: int) -> None:
    box = np.arange(THREADS) % 32
    for _ in range(5):
        v = np.where(box * 0 + np.arange(THREADS) & 1, np.roll(box, 1) + 1, np.roll(box, -1) * 2)
        box = np.where(np.arange(THREADS) % 32 < 16, v, v + 1)
    y = np.zeros(THREADS, np.int32)
    assert run("divergence", "sync_warp", [y], seed=seed).races == ()
    assert (y == box).all()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_lane_may_wait_for_another_lane_of_its_warp(seed: int) -> None:
    flags, y = np.zeros(4, np.int32), np.zeros(THREADS, np.int32)
    run("divergence", "spin_within_a_warp", [flags, y], seed=seed)
    assert (y == 42 + np.arange(THREADS) // 32).all()
