"""Programmatic dependent launch: a kernel waits for the kernel before it, and prefetches constants before the wait."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from compiled import compile_kernel
from op_kernels import own_registry  # noqa: F401

from rooflab.bench.compile.capture import recording_cuda
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.compile_worker import read_cubin
from rooflab.bench.compile.sass import parse_code
from rooflab.bench.emulate.calls import call
from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.engine.llm import LLM
from rooflab.kernels import _cuda, _pdl, registry
from rooflab.kernels.gemm import gemv, swap_ab
from rooflab.kernels.gemm.gemv import GemvConfig
from rooflab.kernels.gemm.swap_ab import SwapAbConfig
from rooflab.reference.spec import SCHEMES, Case

BF16 = SCHEMES["bf16"]
FILE = """
from functools import wraps
from rooflab.kernels._pdl import pdl
from rooflab.kernels.registry import get_kernel, register
fused = get_kernel("{op}", "fused")
@register(op="{op}", name="dependent", role="optimized", backend="triton", tuning=fused.tuning)
@wraps(fused.fn)
def dependent(*args, **kwargs):
    with pdl():
        return fused.fn(*args, **kwargs)
"""
ROPE = "T=3,H=4,H_kv=2,D=64,rotary=64,max_position=64,num_blocks=4,block_size=16,skipped=1,interleaved=false"


@pytest.mark.more
@pytest.mark.timeout(300)  # ten seconds until the emulator's processes are there
@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("op", "case", "constants"),
    [
        ("rope_and_cache", f"{ROPE},norm_eps=0.01", (5, 7)),  # slots twice: the threads take other rows of v than of k
        ("fused_add_rmsnorm", "T=3,H=1024,eps=0.01", (1,)),
        ("silu_and_mul", "T=3,I=1024", (0,)),
    ],
)
def test_a_dependent_kernel_waits_after_what_no_kernel_writes_and_before_all_else(
    op: str, case: str, constants: tuple[int, ...], tmp_path: Path
) -> None:
    file = tmp_path / "dependent.py"
    file.write_text(FILE.format(op=op))
    registry.load_file(file)
    (plain,) = compile_kernel(op, "fused", Case.parse(case), BF16)
    (dependent,) = compile_kernel(op, "dependent", Case.parse(case), BF16, file=file)
    assert "ACQBULK" not in plain.sass
    before, *rest = dependent.sass.split("ACQBULK")
    # One wait on each way through the kernel, which has so many loads before it, no store, and then its trigger.
    ways = [part.rpartition("EXIT")[2] for part in (before, *rest[:-1])]
    assert [way.count("LDG") for way in ways] == list(constants) and "STG" not in "".join(ways)
    assert all(part.index("PREEXIT") < part.index("STG") and "LDG" in part for part in rest)
    answer = call(KernelCase(op, "dependent", Case.parse(case), BF16, file)).answer
    assert answer["status"] == "OK" and not answer["races"], answer["reason"]


def launch_of(module):
    """The launcher of a rung's file, which has its name."""
    return getattr(module, module.__name__.rpartition(".")[2])


@pytest.mark.more
@pytest.mark.parametrize("M", [1, 4])
def test_a_product_asks_for_its_weight_before_it_waits(M: int) -> None:
    """For as much as a thread holds; ptxas moves a load by ld.global.nc behind the wait."""
    launches: list = []
    a, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (M, 4096))
    with recording_cuda("sm_90a", launches), _pdl.pdl():
        gemv.gemv(a, weight.mT, config=gemv.TUNING.heuristic(Case(M=M, N=4096, K=4096)))
    code = [entry.opcode for entry in parse_code(read_cubin(launches[0].cubin, launches[0].name).sass)]
    waits = next(number for number, opcode in enumerate(code) if opcode.startswith("ACQBULK"))
    loads = [opcode for opcode in code[:waits] if opcode.startswith(("LDG", "STG"))]
    assert len(loads) == 8 and all(".NA." in load for load in loads)


WAIT = """
__device__ unsigned int over;
__device__ __forceinline__ void wait_for_kernel_before() {
    unsigned int seen = !WAITS;
    while (!seen) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(&over) : "memory");
}
"""
BEFORE = """
    if (blockIdx.x < SPLIT) {  // the first CTAs stand for a kernel before that writes a and residual and reads out
        for (int i = threadIdx.x; i < M * K && !blockIdx.x; i += blockDim.x) const_cast<T*>(a)[i] = T(1.0f);
        for (int i = threadIdx.x; i < M * stride_out && !blockIdx.x; i += blockDim.x)
            const_cast<T*>(residual)[i] = T(2.0f) + out[i];
        __syncthreads();
        if (threadIdx.x == 0 && !blockIdx.x) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(&over) : "memory");
        return;
    }
"""
A, RESIDUAL, OUT = 0, 3, 4
PARAMETERS_END = "i64 stride_out) {\n"


@pytest.mark.parametrize("waits", [1, 0])
@pytest.mark.parametrize(
    ("module", "config", "shape"),
    [(gemv, GemvConfig(2, 2, 2, 2), (2, 20, 2000)), (swap_ab, SwapAbConfig(8, 64, 64, 3, 2), (5, 72, 264))],
    ids=["gemv", "swap_ab"],
)
def test_all_but_the_weight_is_touched_after_the_wait(module, config, shape, waits, monkeypatch) -> None:
    """The wait becomes one for CTAs that stand for the kernel before, so that the race detector knows the order."""
    M, N, K = shape

    def load(source: str, name: str, *, options: tuple[str, ...], dependent: bool) -> _cuda.CudaKernel:
        assert dependent
        head, body = source.replace('#include "pdl.h"', WAIT).split(PARAMETERS_END)
        body = BEFORE + body.replace("blockIdx.x", "(blockIdx.x - SPLIT)")
        return _cuda.CudaKernel(head + PARAMETERS_END + body, name, (*options, f"-DWAITS={waits}"))

    monkeypatch.setattr(_cuda, "load", load)
    results = []

    def handle(launch, grid, arguments) -> None:
        results.append(emulate(launch, (grid[0] + config.split, *grid[1:]), arguments))

    weight = torch.randint(-2, 3, (N, K)).to(torch.bfloat16)
    a, residual, out = (torch.zeros(M, width, dtype=torch.bfloat16) for width in (K, N, N))
    with _pdl.pdl(), emulating_cuda(handle):
        launch_of(module)(a, weight.mT, residual=residual, out=out, config=config)
    (result,) = results
    raced = {int(number) for race in result.races for number in re.findall(r" of \w+_param_(\d)", str(race))}
    assert raced == (set() if waits else {A, RESIDUAL, OUT})
    assert not waits or torch.equal(out, (weight.float().sum(1) + 2).to(torch.bfloat16).expand(M, N))


def test_pdl_is_refused_where_no_graph_or_no_hopper_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    cases = ("cpu", False, "cpu"), ("cuda", False, "compute capability 8.0"), ("cuda", True, "enforce_eager")
    for device, eager, found in cases:
        with pytest.raises(ValueError, match=f"pdl: expected .*, got {found}"):
            LLM("smollm2-135m", dummy=True, device=device, enforce_eager=eager, pdl=True)
