"""CUDA C++ kernels: lanes that part, locks, pointers into several spaces, and CTAs that wait for one another."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_cuda import BOTH_ORDERS, run

RNG = np.random.default_rng(11)
THREADS = 128


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_lock_lets_one_block_in_at_a_time(seed: int) -> None:
    mutex, y = np.zeros(1, np.int32), np.zeros(2, np.int32)
    assert run("guarded_by_a_lock", [mutex, y], grid=(5,), block=32, seed=seed).races == ()
    assert y.tolist() == [15, 5] and mutex[0] == 0


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_pointer_may_mean_another_space_in_every_lane(seed: int) -> None:
    x, y = RNG.integers(0, 90, THREADS).astype(np.int32), np.zeros(THREADS, np.int32)
    memory, i = np.arange(THREADS, dtype=np.int32) * 3, np.arange(THREADS)
    assert run("generic_pointers", [x, memory, y], seed=seed).races == ()
    value = np.choose(x % 3, [1000 + i, 100 * ((x & 3) + 1), 3 * i])
    assert (y == value + i + np.choose(x % 3, [2, 4, 8])).all()
    assert (memory == 3 * i + np.where(x % 3 == 2, i, 0)).all()


def test_many_volatile_loads_are_not_taken_for_a_wait() -> None:
    x, y = RNG.integers(0, 99, 6000).astype(np.int32), np.zeros(32, np.int32)
    run("long_sum", [x, y, 6000], block=32)
    assert (y == x.sum()).all()


@pytest.mark.parametrize(("giver", "blocks", "seed"), [(0, 4, 3), (3, 4, 0), (69, 70, 0)])
def test_blocks_wait_for_a_flag_whoever_comes_first(giver: int, blocks: int, seed: int) -> None:
    """The last giver does not run together with those that wait for it."""
    box, flag, y = np.zeros(64, np.int32), np.zeros(1, np.int32), np.zeros((blocks, 64), np.int32)
    assert run("acquire_and_release", [giver, box, flag, y], grid=(blocks,), block=64, seed=seed).races == ()
    want = 7 * np.arange(64) + np.arange(blocks)[:, None]
    want[giver] = 0
    assert (y == want).all()


@pytest.mark.parametrize(("blocks", "seed"), [(2, 3), (9, 0)])
def test_all_blocks_of_a_grid_meet(blocks: int, seed: int) -> None:
    count, box = np.zeros(1, np.int32), np.zeros((2, blocks, 64), np.int32)
    y = np.zeros((2, blocks, 64), np.int32)
    assert run("grid_barrier", [count, box, y], grid=(blocks,), block=64, seed=seed).races == ()
    want = (np.arange(64) + np.arange(2)[:, None, None]) * (np.arange(blocks)[:, None] + 1)
    assert (y == want).all()


@pytest.mark.parametrize("n", [128, 100, 64, 33, 1])
def test_threads_that_return_early_are_not_waited_for(n: int) -> None:
    x, y = RNG.integers(1, 60, THREADS).astype(np.int32), np.zeros(1, np.int32)
    result = run("early_return", [x, y, n])
    assert result.races == () and y[0] == x[:n].sum()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_syncwarp_orders_the_lanes_of_a_warp(seed: int) -> None:
    box = np.arange(THREADS) % 32
    for _ in range(5):
        v = np.where(box * 0 + np.arange(THREADS) & 1, np.roll(box, 1) + 1, np.roll(box, -1) * 2)
        box = np.where(np.arange(THREADS) % 32 < 16, v, v + 1)
    y = np.zeros(THREADS, np.int32)
    assert run("sync_warp", [y], seed=seed).races == ()
    assert (y == box).all()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_lane_may_wait_for_another_lane_of_its_warp(seed: int) -> None:
    flags, y = np.zeros(4, np.int32), np.zeros(THREADS, np.int32)
    run("spin_within_a_warp", [flags, y], seed=seed)
    assert (y == 42 + np.arange(THREADS) // 32).all()
