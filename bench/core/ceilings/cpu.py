"""Measures a CPU's ceilings with torch's threads: bytes/s by kind of access, FLOP/s of matrix products by dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psutil
import torch

from rooflab.bench.core.environment import last_level_cache_bytes
from rooflab.bench.core.system_time import time
from rooflab.reference.spec import DTYPE_NAMES
from rooflab.roofline.model import Ceilings

BANDWIDTH_SHARE = 0.25
"""Share of the time budget for bandwidth; the dtypes share the rest equally."""
GEMM_SIZES = (128, 256, 512, 1024, 2048)
"""Square sizes, ascending: a small size shows that a dtype has no fast path (0.3 GFLOP/s) before it costs a minute."""


def measure_cpu(name: str, budget_s: float = 5.0) -> Ceilings:
    """Measures the ceilings in about `budget_s` seconds."""
    access = measure_bandwidth(budget_s * BANDWIDTH_SHARE)
    share = budget_s * (1 - BANDWIDTH_SHARE) / len(DTYPE_NAMES)
    rates = {dtype_name: measure_gemm(dtype, share) for dtype, dtype_name in DTYPE_NAMES.items()}
    # 16-bit operands may be multiplied in fp32, because only K (M + N) values are converted: oneDNN's bf16 products had
    # half of the rate of fp32's on a Xeon without AMX, and `gemm_w8a16/native`, which converts, was above them.
    rates = {dtype_name: max(rate, rates["fp32"]) for dtype_name, rate in rates.items()}
    return Ceilings(
        device=name,
        kind="measured",
        hbm_bytes_per_s=max(access.values()),
        tensor_flops_per_s=rates,
        vector_flops_per_s=rates["fp32"],
        access_bytes_per_s=access,
    )


def measure_bandwidth(budget_s: float) -> dict[str, float]:
    """Highest bytes/s of read, write, copy and triad with all of torch's threads."""
    # STREAM's rule: an array is four times the cache.  The three arrays together take at most an eighth of the memory.
    array_bytes = min(4 * last_level_cache_bytes(), psutil.virtual_memory().total // 24)
    a, b, c = (torch.ones(array_bytes // 4) for _ in range(3))
    moved: dict[str, tuple[int, Callable[[], object]]] = {
        "read": (1, lambda: b.sum()),
        "write": (1, lambda: a.fill_(2.0)),
        "copy": (2, lambda: a.copy_(b)),
        "triad": (3, lambda: torch.add(b, c, alpha=2.0, out=a)),
    }
    return {
        access: arrays * 4 * a.numel() / _fastest_s(run, budget_s / len(moved))
        for access, (arrays, run) in moved.items()
    }


def measure_gemm(dtype: torch.dtype, budget_s: float) -> float:
    """Highest FLOP/s of square matrix products of `dtype`, over sizes and forms, in about `budget_s` seconds."""
    ends = time.perf_counter() + budget_s
    best = 0.0
    slow: set[str] = set()
    for size in GEMM_SIZES:
        for form, run in _products(dtype, size):
            # The next size takes eight times as long, so a form far slower than the best so far is not tried again.
            if form in slow:
                continue
            left = ends - time.perf_counter()
            if best and (left <= 0 or 2 * size**3 / best > left):
                return best
            rate = 2 * size**3 / _fastest_s(run, max(left, 0) / 8)
            if rate < best / 4:
                slow.add(form)
            best = max(best, rate)
    return best


def _products(dtype: torch.dtype, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    # The transposed form comes first: fp16 with both operands row-major has no fast path on most CPUs.
    yield "nt", lambda: torch.mm(a, b.mT, out=out)
    yield "nn", lambda: torch.mm(a, b, out=out)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(b, size)
    except RuntimeError:
        return  # oneDNN has no packed form of this dtype on this CPU
    yield "packed", lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")


def _fastest_s(run: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest of at least two calls: the first call also touches the memory and packs operands."""
    ends = time.perf_counter() + budget_s
    fastest = float("inf")
    calls = 0
    while calls < 2 or time.perf_counter() < ends:
        began = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - began)
        calls += 1
    return fastest
