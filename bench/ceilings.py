"""The ceilings behind a bound: measured on a CPU, from the data sheet on a GPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch

from rooflab.bench.environment import Environment, last_level_cache_bytes, snapshot
from rooflab.engine.model_files import cache_folder
from rooflab.reference.spec import DTYPE_NAMES
from rooflab.roofline.model import Ceilings

CACHE_VARIABLE = "ROOFLAB_CACHE"
BANDWIDTH_SHARE = 0.25
"""Share of the time that goes to bandwidth; the dtypes divide the rest."""
GEMM_SIZES = (128, 256, 512, 1024, 2048)
"""Squares, ascending, so that a dtype with no fast path (0.3 GFLOP/s) is found out before it takes a minute."""


def ceilings_for(device: torch.device) -> Ceilings | None:
    """The ceilings that bound a kernel on `device`: the data sheet's on CUDA, None for a GPU that is in no table."""
    if device.type == "cpu":
        return cpu_ceilings()
    from rooflab.roofline.device import identify

    known = identify(torch.cuda.get_device_name(device))
    return known.ceilings() if known else None


def limits_for(device: torch.device, ceilings: Ceilings) -> Ceilings:
    """What no reading on `device` can pass: on CUDA the data sheet's rates at the highest clock, else `ceilings`."""
    if device.type == "cpu":
        return ceilings
    from rooflab.roofline.device import identify

    known = identify(torch.cuda.get_device_name(device))
    return known.ceilings(known.max_clock_hz) if known else ceilings


def cpu_ceilings(refresh: bool = False, budget_s: float = 5.0, folder: Path | None = None) -> Ceilings:
    """What this CPU was measured to reach with torch's present threads; read from the cache unless `refresh`.

    Bandwidth: STREAM's copy and triad (McCalpin, 1995; write-allocate not counted, as there), and a plain read, over
    arrays of at least four times the last-level cache; the best.  Matrix rates: the best `torch.mm` or packed oneDNN
    product per dtype.  Vector rate: the fp32 matrix rate, because a CPU computes fp32 products on its vector units, and
    no other torch call keeps them as busy.  Special functions are not measured and bound nothing.  What was measured
    while other processes ran is too low (a tenth was seen), and is measured anew once they are gone.
    """
    environment = snapshot()
    path = _path(folder, environment)
    known = None if refresh else _load(path, environment)
    if known is not None:
        return known
    busy = _busy()
    measured = measure_cpu(environment.cpu, budget_s)
    _save(path, environment, measured, busy)
    return measured


def _busy() -> bool:
    """Whether other processes hold more than a quarter of this machine while this one sleeps."""
    return float(psutil.cpu_percent(interval=0.25)) > 25.0


def raise_cpu_ceilings(known: Ceilings, budget_s: float = 5.0, folder: Path | None = None) -> Ceilings:
    """Measures again after a reading above `known`, and keeps the larger of each rate: a busy machine lowers none."""
    again = cpu_ceilings(refresh=True, budget_s=budget_s, folder=folder)
    rates = {
        dtype: max(rate, known.tensor_flops_per_s.get(dtype, 0.0)) for dtype, rate in again.tensor_flops_per_s.items()
    }
    raised = replace(
        again,
        hbm_bytes_per_s=max(again.hbm_bytes_per_s, known.hbm_bytes_per_s),
        tensor_flops_per_s=rates,
        vector_flops_per_s=max(again.vector_flops_per_s, known.vector_flops_per_s),
    )
    environment = snapshot()
    _save(_path(folder, environment), environment, raised)
    return raised


def _path(folder: Path | None, environment: Environment) -> Path:
    return (folder or cache_folder()) / "ceilings" / f"{environment.machine_key}.json"


def measure_cpu(name: str, budget_s: float = 5.0) -> Ceilings:
    """Measures anew in about `budget_s` seconds."""
    bandwidth = measure_bandwidth(budget_s * BANDWIDTH_SHARE)
    share = budget_s * (1 - BANDWIDTH_SHARE) / len(DTYPE_NAMES)
    rates = {dtype_name: measure_gemm(dtype, share) for dtype, dtype_name in DTYPE_NAMES.items()}
    return Ceilings(
        device=name,
        kind="measured",
        hbm_bytes_per_s=bandwidth,
        tensor_flops_per_s=rates,
        vector_flops_per_s=rates["fp32"],
    )


def measure_bandwidth(budget_s: float) -> float:
    """Best bytes per second of read, copy and triad by all of torch's threads."""
    # STREAM's rule is four times the cache; three arrays together take at most an eighth of the memory.
    array_bytes = min(4 * last_level_cache_bytes(), psutil.virtual_memory().total // 24)
    a, b, c = (torch.ones(array_bytes // 4) for _ in range(3))
    moved: tuple[tuple[int, Callable[[], object]], ...] = (
        (1, lambda: b.sum()),
        (2, lambda: a.copy_(b)),
        (3, lambda: torch.add(b, c, alpha=2.0, out=a)),
    )
    return max(arrays * 4 * a.numel() / _fastest_s(run, budget_s / len(moved)) for arrays, run in moved)


def measure_gemm(dtype: torch.dtype, budget_s: float) -> float:
    """Best FLOP/s of square products of `dtype`, over sizes and forms, in about `budget_s` seconds."""
    ends = time.perf_counter() + budget_s
    best = 0.0
    slow: set[str] = set()
    for size in GEMM_SIZES:
        for form, run in _products(dtype, size):
            # The next size takes eight times as long: a form far behind the best so far is not tried again.
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
    # Transposed first: fp16 with both operands row-major has no fast path on most CPUs.
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
    """Fastest of several calls, and of at least two: the first touches memory and packs."""
    ends = time.perf_counter() + budget_s
    fastest = float("inf")
    calls = 0
    while calls < 2 or time.perf_counter() < ends:
        began = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - began)
        calls += 1
    return fastest


def _load(path: Path, environment: Environment) -> Ceilings | None:
    """The cached ceilings, or None where there are none that were measured under these versions and threads."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        then = found["environment"]
        if any(then[name] != getattr(environment, name) for name in ("threads", "torch", "cpu")):
            return None
        return None if found["busy"] and not _busy() else Ceilings(**found["ceilings"])
    except (ValueError, KeyError, TypeError):
        return None  # cut short or of another version: measured anew and overwritten


def _save(path: Path, environment: Environment, measured: Ceilings, busy: bool = False) -> None:
    found = {"environment": environment.to_dict(), "busy": busy, "ceilings": asdict(measured)}
    text = json.dumps(found, indent=1)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{CACHE_VARIABLE}: expected a folder that can be written to, got {error}") from error
