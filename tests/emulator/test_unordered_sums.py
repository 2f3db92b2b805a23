"""Sums of floats by atomics: those whose last bits depend on the order are named, and no others."""

from __future__ import annotations

import pytest
import torch
from ptx_lines import SHARED
from ptx_lines import launch as lines

from rooflab.bench.emulate.ours import compile_ptx
from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import Checks

SOURCE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
__device__ int number() { return blockIdx.x * blockDim.x + threadIdx.x; }
extern "C" __global__ void one(const float* x, float* y) { atomicAdd(y, x[number()]); }
extern "C" __global__ void rows(const float* x, float* y) { atomicAdd(y + threadIdx.x, x[number()]); }
extern "C" __global__ void own(const float* x, float* y) {
    const int i = number();
    for (int turn = 0; turn < 4; ++turn) atomicAdd(y + i, x[i] + turn);
}
extern "C" __global__ void within(const float* x, float* y) {
    __shared__ float sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, x[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
extern "C" __global__ void halves(const float* x, __half* y) {
    atomicAdd(y + threadIdx.x % 8, __float2half(x[threadIdx.x]));
}
extern "C" __global__ void pairs(const float* x, __nv_bfloat162* y) {
    atomicAdd(y + threadIdx.x % 8, __floats2bfloat162_rn(x[threadIdx.x], 1.0f));
}
extern "C" __global__ void doubles(const double* x, double* y) { atomicAdd(y, x[threadIdx.x]); }
extern "C" __global__ void integers(const int* x, int* y) { atomicAdd(y, x[threadIdx.x]); }
"""


def notes(name: str, x: torch.Tensor, y: torch.Tensor, ctas: int, threads: int = 64, **checks: bool) -> tuple[str, ...]:
    """The notes on one kernel of `SOURCE`; it has no race."""
    launch = PtxLaunch(compile_ptx(SOURCE), name, (threads, 1, 1))
    result = emulate(launch, (ctas,), [x, y], checks=Checks(**checks))
    assert result.races == ()
    return result.notes


def drawn(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose sums are rounded."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype) / 3


@pytest.mark.parametrize(
    ("name", "x", "y", "ctas"),
    [
        ("one", drawn(64), torch.zeros(1), 1),
        ("one", drawn(256), torch.zeros(1), 4),
        ("rows", drawn(192), torch.zeros(64), 3),
        ("rows", drawn(128), torch.ones(64) / 3, 2),
        ("within", drawn(64), torch.zeros(2), 2),
        ("halves", drawn(64), torch.zeros(8, dtype=torch.float16), 2),
        ("pairs", drawn(64), torch.zeros(8, 2, dtype=torch.bfloat16), 2),
        ("doubles", drawn(64, torch.float64), torch.zeros(1, dtype=torch.float64), 2),
    ],
)
def test_a_sum_whose_order_shows_is_named_once(name: str, x: torch.Tensor, y: torch.Tensor, ctas: int) -> None:
    (note,) = notes(name, x, y, ctas)
    assert "kernel.cu:" in note and "the sum's last bits depend on the order" in note
    assert notes(name, x, torch.zeros_like(y), ctas, races=False) == ()


@pytest.mark.parametrize(
    ("name", "x", "y", "ctas", "threads"),
    [
        ("rows", drawn(128), torch.zeros(64), 2, 64),  # two terms have one sum
        ("rows", torch.arange(192.0), torch.zeros(64), 3, 64),  # no sum is rounded
        ("own", drawn(128), torch.zeros(128), 2, 64),  # each thread adds to a place of its own
        ("one", drawn(32), torch.zeros(1), 1, 32),  # one warp
        ("integers", torch.arange(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 3, 64),
    ],
)
def test_a_sum_that_every_order_gives_is_not_named(
    name: str, x: torch.Tensor, y: torch.Tensor, ctas: int, threads: int
) -> None:
    assert notes(name, x, y, ctas, threads) == ()


@pytest.mark.parametrize(
    ("divisor", "grid", "count"), [("0f40400000", 3, 1), ("0f40400000", 2, 0), ("0f40000000", 3, 0)]
)
def test_a_bulk_reduction_is_a_sum_too(divisor: str, grid: int, count: int) -> None:
    """Each CTA adds its number and a thread's, by three or by two: halves are exact."""
    body = f"""mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; add.u32 %r5, %r31, %r0; add.u32 %r5, %r5, 1;
        cvt.rn.f32.u32 %f1, %r5; div.rn.f32 %f1, %f1, {divisor}; st.shared.f32 [%r4], %f1; mov.u32 %r1, 0;
        fence.proxy.async; bar.sync 0; add.u64 %d3, %d0, 512;
        @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d3], [%r2], 128;
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"""
    _, result = lines(body, declared=SHARED, grid=grid, to=torch.zeros(160, dtype=torch.int32))
    assert result.races == () and len(result.notes) == count
