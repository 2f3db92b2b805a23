"""`preflight.py OUT.json`: tests what a GPU machine has, with one process for each question, all at once.

A process that hangs or breaks has no answer, and affects no other.  The first seven questions need nothing of Rooflab.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TOOLS = ("gcc", "g++", "git", "nvcc", "ncu", "compute-sanitizer", "cuobjdump", "ninja")
PACKAGES = (
    "torch triton cupy-cuda13x numpy cuda-pathfinder nvidia-ml-py nvidia-cudnn-cu13 nvidia-cublas nvidia-cuda-nvrtc "
    "nvidia-cuda-runtime pytest-benchmark transformers typer"
).split()
SMI = (
    "name,uuid,driver_version,power.limit,clocks.sm,clocks.max.sm,clocks.mem,ecc.mode.current,compute_mode,"
    "mig.mode.current,clocks_event_reasons.active"
)
VARIABLES = ("CUDA", "LD_", "TORCH", "TRITON", "PYTORCH", "NVIDIA")
CLUSTER = r"""
extern "C" __global__ void __cluster_dims__(4, 1, 1) add_one(float* x) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  x[blockIdx.x] += 1.f;
}"""


def shell(line: str) -> str:
    """The last 3,000 characters that a shell command prints."""
    return subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60).stdout.strip()[-3000:]


def tools() -> Any:
    """The paths of the tools."""
    return {name: shutil.which(name) for name in TOOLS}


def card() -> Any:
    """The card as its driver describes it."""
    return shell(f"nvidia-smi --query-gpu={SMI} --format=csv")


def machine() -> Any:
    """The cores, the shared memory, and the environment variables that change a library's behaviour."""
    return {
        "cores": os.cpu_count(),
        "cpu": shell("grep -m1 'model name' /proc/cpuinfo"),
        "shared memory": shell("df -h /dev/shm | tail -1"),
        "driver libraries": shell("ldconfig -p | grep libcuda.so"),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
    }


def packages() -> Any:
    """The versions of packages; null for a missing package."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def products() -> Any:
    """The card's properties as torch reports them, and cuBLAS's rate at 8,192 cubed in bf16."""
    import torch

    about = torch.cuda.get_device_properties(0)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    for _ in range(5):
        a @ b
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return {
        "name": about.name,
        "l2_bytes": about.L2_cache_size,
        "sms": about.multi_processor_count,
        "cublas_tflops": 20 * 2 * 8192**3 / start.elapsed_time(end) / 1e9,
        "cudnn": torch.backends.cudnn.version(),
    }


def event_steps() -> Any:
    """The smallest differences between the times of events, in ns: the clock's step."""
    import torch

    pairs = []
    for number in range(200):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(1000 + 37 * number)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times = sorted({round(start.elapsed_time(end) * 1e6) for start, end in pairs})
    return {"least_ns": times[0], "steps_ns": sorted(b - a for a, b in itertools.pairwise(times))[:5]}


def profiler() -> Any:
    """Whether torch's profiler sees kernels, by the kinds of its events."""
    import torch
    from torch.autograd import profiler as recorder

    with recorder.profile(use_device="cuda", use_kineto=True) as seen:
        with recorder.record_function("mark"):
            torch.ones(1000, device="cuda").sum()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return dict(Counter(event.get("cat", "") for event in events))


def cuda_cpp() -> Any:
    """Runs NVRTC code, a cluster, a launch that depends on the previous one, and a graph; each must give `x` = 3."""
    import numpy as np
    import torch

    from rooflab.kernels import _cuda, _pdl

    kernel, x = _cuda.CudaKernel(CLUSTER, "add_one"), torch.zeros(8, device="cuda")
    kernel((8,), (1,), x)
    torch.cuda.synchronize()
    stream, arguments = torch.cuda.current_stream().cuda_stream, (np.uint64(x.data_ptr()),)
    _pdl.launch_dependent(kernel.raw(0).kernel.ptr, (8,), (1,), arguments, 0, stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel((8,), (1,), x)
    graph.replay()
    torch.cuda.synchronize()
    return {"x": x.tolist(), "nvrtc": _cuda.nvrtc_version(), "headers": [str(f) for f in _cuda.include_folders()]}


def gluon() -> Any:
    """The relative error of `gemm/cooperative`: TMA, wgmma and warp specialization in one kernel."""
    import torch

    from rooflab.kernels.registry import get_kernel

    a = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16).mT
    right = a.double() @ b.double()
    found = get_kernel("gemm", "cooperative")(a=a, b=b)
    return float((found.double() - right).norm() / right.norm())


def plan() -> Any:
    """The number of entries in the suite's plan on this machine."""
    from rooflab.bench.suite.plan import make_plan

    return len(make_plan())


QUESTIONS: dict[str, Callable[[], Any]] = {
    question.__name__: question
    for question in (tools, card, machine, packages, products, event_steps, profiler, cuda_cpp, gluon, plan)
}
LIMIT_S = 60


def ask(name: str) -> Any:
    """The answer of a question's process, or how the process ended."""
    began = time.monotonic()
    command = [sys.executable, __file__, "--ask", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LIMIT_S} s"}
    seconds = round(time.monotonic() - began, 1)
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {done.stderr.strip()[-1500:]}", "seconds": seconds}
    return {"answer": json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


def main(path: Path) -> None:
    """Asks all questions at once, and writes each answer as it comes."""
    answers: dict[str, Any] = {}
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        asked = {pool.submit(ask, name): name for name in QUESTIONS}
        for future in as_completed(asked):
            answers[asked[future]] = future.result()
            path.write_text(json.dumps(answers, indent=1) + "\n")
            print(asked[future], str(future.result())[:200], flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        print(json.dumps(QUESTIONS[sys.argv[2]](), default=str))
    else:
        main(Path(sys.argv[1]))
