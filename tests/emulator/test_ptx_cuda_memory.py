"""Atomics, address spaces, calls and arguments of CUDA C++ kernels, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_cuda import BOTH_ORDERS, run

RNG = np.random.default_rng(11)
THREADS = 128


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_integer_atomics_leave_what_any_order_leaves(seed: int) -> None:
    x = RNG.integers(1, 1 << 20, 256).astype(np.int32)
    y, old = np.array([0, 1 << 30, 0, 0, 0, -1, 0, 0], np.int32), np.zeros(256, np.int32)
    assert run("memory", "atomics_on_integers", [x, y, old], grid=(2,), seed=seed).races == ()
    xor, or_ = np.bitwise_xor.reduce(x), np.bitwise_or.reduce(x)
    want = [256, x.min(), x.max(), xor, or_, np.bitwise_and.reduce(x | 0xFF00), 256 % 10, -x.sum()]
    assert y.tolist() == want
    assert sorted(old.tolist()) == list(range(256))


def test_floating_atomics_of_every_width() -> None:
    x = RNG.standard_normal(256).astype(np.float32)
    total, wide, halves = np.zeros(1, np.float32), np.zeros(1), np.zeros(2, np.float16)
    brains, big = np.zeros(2, np.uint16), np.zeros(1, np.int64)
    run("memory", "atomics_on_floats", [x, total, wide, halves, brains, big], grid=(2,))
    assert abs(total[0] - x.sum()) < 1e-4 and abs(wide[0] - x.astype(np.float64).sum()) < 1e-12
    assert halves.tolist() == [256, 128] and big[0] == 256 << 33
    assert (brains.astype(np.uint32) << 16).view(np.float32).tolist() == [256, -64]


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_loop_around_compare_and_swap(seed: int) -> None:
    x, y = np.abs(RNG.standard_normal(384)).astype(np.float32), np.zeros(1, np.float32)
    assert run("memory", "maximum_by_cas", [x, y], grid=(3,), seed=seed).races == ()
    assert y[0] == x.max()


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_lock_lets_one_block_in_at_a_time(seed: int) -> None:
    mutex, y = np.zeros(1, np.int32), np.zeros(2, np.int32)
    assert run("memory", "guarded_by_a_lock", [mutex, y], grid=(5,), block=32, seed=seed).races == ()
    assert y.tolist() == [15, 5] and mutex[0] == 0


def test_local_arrays_belong_to_each_thread() -> None:
    x, y = RNG.integers(0, 50, THREADS).astype(np.int32), np.zeros(THREADS, np.int32)
    run("memory", "local_array", [x, y, 13])
    for i in range(THREADS):
        own, total = [k * i for k in range(24)], 0
        for k in range(13):
            own[(int(x[i]) + k * 7) % 24] += k + 1
        for k in range(13):
            total = total * 3 + own[int(x[i]) * k % 24]
        assert y[i] == np.array(total).astype(np.int32)


def test_constant_memory_and_device_variables_begin_as_declared() -> None:
    x, y = RNG.integers(0, 50, THREADS).astype(np.int32), np.zeros(THREADS, np.float32)
    run("memory", "constants", [x, y])
    weights, offsets, table = (
        np.array(values, np.float32) for values in ([0.5, -1.25, 3, 8, 0, -0.125], [3, -1, 70, 9], [10, 20, 30])
    )
    assert (y == weights[x % 6] + offsets[x % 4] + table[x % 3] + 20).all()


def test_functions_that_are_not_inlined_take_and_give_structures() -> None:
    x, y = RNG.standard_normal((THREADS, 10)).astype(np.float32), np.zeros((THREADS, 4), np.float32)
    run("memory", "calls", [x, y])
    for i in range(THREADS):
        total, count, wide = np.float32(0), 0, 1.0
        for length in (10, i % 10 if i % 3 else 0):
            for v in x[i, :length]:
                if v >= 0:
                    total, count, wide = np.float32(total + v), count + 1, wide + float(v) * float(v)
                    if count == 7:
                        break
        chained = 2 * x[i, 0] + 1 if i & 1 else 4 * x[i, 0]
        assert y[i].tolist() == [total, count, np.float32(wide), chained]


@pytest.mark.parametrize("seed", BOTH_ORDERS)
def test_a_pointer_may_mean_another_space_in_every_lane(seed: int) -> None:
    x, y = RNG.integers(0, 90, THREADS).astype(np.int32), np.zeros(THREADS, np.int32)
    memory, i = np.arange(THREADS, dtype=np.int32) * 3, np.arange(THREADS)
    assert run("memory", "generic_pointers", [x, memory, y], seed=seed).races == ()
    value = np.choose(x % 3, [1000 + i, 100 * ((x & 3) + 1), 3 * i])
    assert (y == value + i + np.choose(x % 3, [2, 4, 8])).all()
    assert (memory == 3 * i + np.where(x % 3 == 2, i, 0)).all()


def test_structures_and_narrow_numbers_as_arguments() -> None:
    given = np.zeros(1, np.dtype([("a", "i4"), ("b", "f4"), ("c", "i8"), ("d", "i1", 5)], align=True))
    given["a"], given["b"], given["c"], given["d"] = -5, 0.5, 1 << 40, [1, -2, 3, -4, 5]
    y = np.zeros(THREADS)
    raw = given.tobytes().ljust(32, b"\0")
    run("memory", "struct_argument", [raw, np.float16(0.25).tobytes(), -7, y])
    assert (y == -5 + 0.5 + (1 << 40) + np.resize([1, -2, 3, -4, 5], THREADS) + 0.25 - 7).all()


def test_dynamic_shared_memory_has_the_size_of_the_launch() -> None:
    x, y = RNG.uniform(1, 2, 300).astype(np.float32), np.zeros(300)
    assert run("memory", "dynamic_shared", [x, y, 300], shared=300 * 12).races == ()
    assert (y == 1.0 / x[::-1].astype(np.float64) + x).all()


def test_many_volatile_loads_are_not_taken_for_a_wait() -> None:
    x, y = RNG.integers(0, 99, 6000).astype(np.int32), np.zeros(32, np.int32)
    run("memory", "long_sum", [x, y, 6000], block=32)
    assert (y == x.sum()).all()
