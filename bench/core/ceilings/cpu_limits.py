"""Measures a CPU's peak rates with torch's threads: bytes/s for each kind of access, matrix FLOP/s for each dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core.environment import Environment, last_level_cache_bytes
from rooflab.bench.core.noise import why_noisy
from rooflab.bench.core.record import Record, new_run_id
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.reference.spec import DTYPE_NAMES

BANDWIDTH_BUDGET_SHARE = 0.25
"""The share of the time budget for bandwidth.  The dtypes share the rest equally."""
GEMM_SIZES = (128, 256, 512, 1024, 2048)
"""Sizes of square matrices, ascending.  A dtype without a fast path (0.3 GFLOP/s) stops before it costs a minute."""


def measure_cpu(environment: Environment, budget_s: float) -> list[Record]:
    """Returns a record for each limit of this CPU, measured in about `budget_s` seconds with torch's present threads.

    Bandwidth is measured with STREAM's copy and triad (McCalpin, 1995), a plain read and a plain write.  Write-allocate
    is not counted.  Each array is at least 4x the last-level cache.  Caches get no rate: virtual machines share them.

    A dtype's matrix rate is the better rate of `torch.mm` and packed oneDNN.  A 16-bit dtype gets at least the rate of
    fp32, because torch may convert it to fp32.  The vector rate is the fp32 matrix rate.  If other processes run, the
    rates are too low (in one case a tenth of the right rate) and NOISY."""
    times_before = run_times()
    access_rates = measure_bandwidth(budget_s * BANDWIDTH_BUDGET_SHARE)
    dtype_budget_s = budget_s * (1 - BANDWIDTH_BUDGET_SHARE) / len(DTYPE_NAMES)
    rate_by_dtype = {dtype_name: measure_gemm(dtype, dtype_budget_s) for dtype, dtype_name in DTYPE_NAMES.items()}
    # 16-bit operands may be multiplied in fp32, because only K (M + N) values are converted: oneDNN's bf16 products had
    # half of the rate of fp32's on a Xeon without AMX, and `gemm_w8a16/native`, which converts, was above them.
    matrix_limits = {f"{name} matrix": (name, max(rate, rate_by_dtype["fp32"])) for name, rate in rate_by_dtype.items()}
    noise_reason = why_noisy((), waiting_since(times_before))
    base_fields: dict[str, Any] = {"kind": "ceiling", "run_id": new_run_id(), **environment.record_fields()}
    base_fields |= {"backend": "torch", "device": "cpu", "basis": "measured"}
    base_fields |= {"status": "NOISY" if noise_reason else "OK", "reason": noise_reason}
    records = [Record(kernel=f"memory {name}", bytes_per_s=rate, **base_fields) for name, rate in access_rates.items()]
    for limit_name, (dtype, rate) in {**matrix_limits, "fp32 vector": ("fp32", rate_by_dtype["fp32"])}.items():
        records.append(Record(kernel=limit_name, scheme=dtype, flops_per_s=rate, **base_fields))
    return records


def measure_bandwidth(budget_s: float) -> dict[str, float]:
    """Returns the highest bytes/s of read, write, copy and triad (`a = b + s * c`), with all of torch's threads."""
    # STREAM's rule: an array is four times the cache.  The three arrays together take at most an eighth of the memory.
    array_bytes = min(4 * last_level_cache_bytes(), psutil.virtual_memory().total // 24)
    a, b, c = (torch.ones(array_bytes // 4) for _ in range(3))
    access_kinds: dict[str, tuple[int, Callable[[], object]]] = {
        "read": (1, lambda: b.sum()),
        "write": (1, lambda: a.fill_(2.0)),
        "copy": (2, lambda: a.copy_(b)),
        "triad": (3, lambda: torch.add(b, c, alpha=2.0, out=a)),
    }
    return {
        access_name: array_count * 4 * a.numel() / _fastest_s(access_call, budget_s / len(access_kinds))
        for access_name, (array_count, access_call) in access_kinds.items()
    }


def measure_gemm(dtype: torch.dtype, budget_s: float) -> float:
    """Returns the best FLOP/s of square matrix products of `dtype` in about `budget_s` seconds, over `GEMM_SIZES`."""
    deadline = time.perf_counter() + budget_s
    best_rate = 0.0
    slow_forms: set[str] = set()
    for matrix_size in GEMM_SIZES:
        for form_name, multiply in product_forms(dtype, matrix_size):
            # The next size takes eight times as long, so a form far slower than the best so far is not tried again.
            if form_name in slow_forms:
                continue
            remaining_s = deadline - time.perf_counter()
            if best_rate and (remaining_s <= 0 or 2 * matrix_size**3 / best_rate > remaining_s):
                return best_rate
            gemm_rate = 2 * matrix_size**3 / _fastest_s(multiply, max(remaining_s, 0) / 8)
            if gemm_rate < best_rate / 4:
                slow_forms.add(form_name)
            best_rate = max(best_rate, gemm_rate)
    return best_rate


def product_forms(dtype: torch.dtype, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields each way in which torch multiplies two square matrices of this size: a name, and a function to call."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    product_out = torch.empty_like(a)
    # The transposed form comes first: fp16 with both operands row-major has no fast path on most CPUs.
    yield "nt", lambda: torch.mm(a, b.mT, out=product_out)
    yield "nn", lambda: torch.mm(a, b, out=product_out)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    try:
        packed_weight = torch.ops.mkldnn._reorder_linear_weight(b, size)
    except RuntimeError:
        return  # oneDNN has no packed form of this dtype on this CPU
    yield "packed", lambda: torch.ops.mkldnn._linear_pointwise(a, packed_weight, None, "none", [], "")


def _fastest_s(run: Callable[[], object], budget_s: float) -> float:
    """Returns `run`'s shortest time in seconds.  Makes at least two calls, because the first also packs operands."""
    deadline = time.perf_counter() + budget_s
    fastest_s = float("inf")
    call_count = 0
    while call_count < 2 or time.perf_counter() < deadline:
        start_time = time.perf_counter()
        run()
        fastest_s = min(fastest_s, time.perf_counter() - start_time)
        call_count += 1
    return fastest_s
