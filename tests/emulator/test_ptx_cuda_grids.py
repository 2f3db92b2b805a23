"""CTAs of a CUDA C++ grid that wait for one another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_cuda import BOTH_ORDERS, ptx, run

from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate

RNG = np.random.default_rng(12)


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_the_last_block_to_arrive_sees_what_the_others_left(seed: int) -> None:
    x, y = RNG.standard_normal(2000).astype(np.float32), np.zeros(1, np.float32)
    partial, count = np.zeros(5, np.float32), np.zeros(1, np.int32)
    assert run("memory", "last_arriver", [x, partial, count, y, 2000], grid=(5,), seed=seed).races == ()
    assert abs(y[0] - x.sum()) < 1e-3 and count[0] == 0


@pytest.mark.parametrize(("giver", "seed"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("name", ["spin_on_a_flag", "acquire_and_release"])
def test_blocks_wait_for_a_flag_whoever_comes_first(name: str, giver: int, seed: int) -> None:
    box, flag, y = np.zeros(64, np.int32), np.zeros(1, np.int32), np.zeros((4, 64), np.int32)
    assert run("memory", name, [giver, box, flag, y], grid=(4,), block=64, seed=seed).races == ()
    want = 7 * np.arange(64) + np.arange(4)[:, None]
    want[giver] = 0
    assert (y == want).all()


def test_blocks_wait_for_one_that_does_not_run_with_them() -> None:
    giver = 69
    box, flag, y = np.zeros(64, np.int32), np.zeros(1, np.int32), np.zeros((70, 64), np.int32)
    assert run("memory", "acquire_and_release", [giver, box, flag, y], grid=(70,), block=64).races == ()
    assert (np.delete(y, giver, axis=0) == np.delete(7 * np.arange(64) + np.arange(70)[:, None], giver, axis=0)).all()


@pytest.mark.parametrize(("blocks", "seed"), [(2, 3), (9, 0)])
def test_all_blocks_of_a_grid_meet(blocks: int, seed: int) -> None:
    count, box = np.zeros(1, np.int32), np.zeros((2, blocks, 64), np.int32)
    y = np.zeros((2, blocks, 64), np.int32)
    assert run("memory", "grid_barrier", [count, box, y], grid=(blocks,), block=64, seed=seed).races == ()
    want = (np.arange(64) + np.arange(2)[:, None, None]) * (np.arange(blocks)[:, None] + 1)
    assert (y == want).all()


def test_three_dimensions_of_threads_and_blocks() -> None:
    y = torch.zeros(3, 2, 2, 4, 5, 6, dtype=torch.int32)
    assert emulate(PtxLaunch(ptx("memory"), "three_dimensions", (6, 5, 4)), (2, 2, 3), [y]).races == ()
    b2, b1, b0, t2, t1, t0 = np.indices((3, 2, 2, 4, 5, 6))
    assert (y.numpy() == t0 + 10 * t1 + 100 * t2 + 1000 * b0 + 10000 * b1 + 100000 * b2).all()
