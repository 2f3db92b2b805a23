"""What named barriers order: what a warp did before it arrived, for those who wait at that barrier, and no more."""

from __future__ import annotations

import pytest
import torch

from rooflab.bench.ptx.arguments import Launch
from rooflab.bench.ptx.cuda_kernels import compile_ptx
from rooflab.bench.ptx.launch import emulate

SOURCE = r"""
extern "C" __global__ void after_arriving(int* out) {  // warp 0 arrives and writes only then
    __shared__ int s[32];
    int t = threadIdx.x;
    if (EARLY && t < 32) s[t] = t;
    if (t < 32) { asm volatile("bar.arrive 1, 64;" ::: "memory"); if (!EARLY) s[t] = t; }
    else { asm volatile("bar.sync 1, 64;" ::: "memory"); out[t - 32] = s[t - 32]; }
}
extern "C" __global__ void another_barrier(int* out) {  // warp 1 waits at barrier 2, and warp 0 arrived at 1
    __shared__ int s[32];
    int t = threadIdx.x;
    if (t < 32) { s[t] = t; asm volatile("bar.arrive 1, 64;" ::: "memory"); }
    else if (t >= 64) {
        asm volatile("bar.arrive 2, 64;" ::: "memory");
        asm volatile("bar.sync 1, 64;" ::: "memory");
        out[t] = s[t - 64];
    } else { asm volatile("bar.sync 2, 64;" ::: "memory"); out[t - 32] = s[t - 32]; }
}
"""


def races(name: str, early: int, block: int, seed: int) -> tuple[str, ...]:
    """What is reported."""
    text = compile_ptx(SOURCE, options=(f"-DEARLY={early}",))
    out = torch.zeros(128, dtype=torch.int32)
    found = emulate(Launch(text, name, (block, 1, 1)), (1,), [out], seed=seed)
    return found.races


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_an_arrival_orders_what_came_before_it_and_not_what_comes_after(seed: int) -> None:
    assert races("after_arriving", 1, 64, seed) == ()
    assert len(races("after_arriving", 0, 64, seed)) == 1


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_arrivals_at_one_barrier_say_nothing_to_those_who_wait_at_another(seed: int) -> None:
    found = races("another_barrier", 0, 96, seed)
    assert any("wrote it in warp 0" in race and "read it in warp 1" in race for race in found)
