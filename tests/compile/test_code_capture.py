"""Launches of Triton, of Gluon and of CUDA C++ become compilations, with no GPU."""

from __future__ import annotations

import pytest
from test_code_options import SILU, Found, compiled, only

from rooflab.bench.compile.static import CompileFailure
from rooflab.bench.compile.summary import options, summarize
from rooflab.roofline.device import get_device

KERNELS = '''
import numpy
import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from rooflab.kernels import _cuda
from rooflab.kernels.registry import register

def result(x):
    return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)

@gluon.jit
def gluon_halve(x, y, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(y + i, gl.load(x + i, mask=i < n) * 0.5, mask=i < n)

@register(op="silu_and_mul", name="test_gluon", role="optimized", backend="gluon")
def by_gluon(x):
    out = result(x)
    gluon_halve[(0,)](x, out, 0, 1024)  # an empty grid is no launch
    gluon_halve[(triton.cdiv(out.numel(), 1024),)](x, out, out.numel(), 1024, num_warps=4)
    return out

SOURCE = r"""
#include <cuda_bf16.h>
extern "C" __global__ void other(float* x) { x[0] = 1.0f; }
extern "C" __global__ void cuda_halve(const __nv_bfloat16* x, __nv_bfloat16* y, int n) {
    __shared__ float tile[256];
    extern __shared__ float more[];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        tile[threadIdx.x] = more[threadIdx.x] = __bfloat162float(x[i]);
        __syncthreads();
        y[i] = __float2bfloat16(0.5f * tile[threadIdx.x ^ 1] + more[threadIdx.x ^ 2]);
    }
}
"""

@register(op="silu_and_mul", name="test_cuda", role="optimized", backend="cuda")
def by_cuda(x):
    out = result(x)
    kernel = _cuda.load(SOURCE, "cuda_halve", options=("-DUNUSED=1",))
    kernel((33, 2), (128, 2), x, out, numpy.int32(out.numel()), shared_bytes=2048)
    return out

@register(op="silu_and_mul", name="test_cuda_number", role="optimized", backend="cuda")
def bad_argument(x):
    _cuda.load(SOURCE, "cuda_halve")((1,), (32,), x, x, 3)
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Everything that the tests below look at, compiled once."""
    wanted = [("silu_and_mul", name, SILU, "bf16") for name in ("gluon", "cuda", "cuda_number")]
    return compiled(tmp_path_factory.mktemp("kernels"), KERNELS, wanted)


def test_a_gluon_kernel(found):
    info = only(found, "gluon")
    assert (info.backend, info.name, info.num_warps, info.threads) == ("gluon", "gluon_halve", 4, 128)
    assert info.ctas == 64 and info.counts["global_load"] == 1 and not info.loops
    assert not [option for option in options(info, "bf16") if not option.took_effect]


def test_a_cuda_kernel(found):
    info = only(found, "cuda")
    assert (info.backend, info.name, info.target, info.grid) == ("cuda", "cuda_halve", "sm_90a", (33, 2))
    assert (info.ctas, info.threads, info.num_warps) == (66, 256, 8)
    assert info.shared_bytes == 256 * 4 + 2048, "what the code declares and what the launch adds"
    assert 0 < info.registers < 64 and info.stack_bytes == 0 and info.asked == {"options": "-DUNUSED=1"}
    summary = summarize(info, "bf16", get_device("h100"))
    assert summary.loop["load_bytes_worst"] == 2, "a bf16 at a time"
    assert (summary.ctas_per_sm, summary.full_waves, summary.tail_ctas) == (8, 0, 66)


def test_what_a_launch_would_refuse_is_a_failure(found):
    failure = found["cuda_number"]
    assert isinstance(failure, CompileFailure) and "expected a tensor, None or a NumPy scalar" in str(failure)
