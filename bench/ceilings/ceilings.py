"""The ceilings behind a bound: measured on a CPU, and on a GPU measured where they were, else from the data sheet."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import psutil
import torch

from rooflab.bench.ceilings import kept as ceilings_kept
from rooflab.bench.ceilings.kept import Kept, write_json
from rooflab.bench.ceilings.readings import Reading, assemble, better, larger, with_stand_ins, without_stand_ins
from rooflab.bench.records.environment import Environment, last_level_cache_bytes, snapshot
from rooflab.engine.model_files import cache_folder
from rooflab.reference.spec import DTYPE_NAMES
from rooflab.roofline.device import identify
from rooflab.roofline.model import Ceilings

BANDWIDTH_SHARE = 0.25
"""Share of the time that goes to bandwidth; the dtypes divide the rest."""
GEMM_SIZES = (128, 256, 512, 1024, 2048)
"""Squares, ascending, so that a dtype with no fast path (0.3 GFLOP/s) is found out before it takes a minute."""


CUDA_BUDGET_S = 60.0


def ceilings_for(device: torch.device) -> Ceilings | None:
    """The ceilings that bound a kernel on `device`; their `kind` says which they are.

    On CUDA those measured on this card (`rooflab ceilings`), where they were under the present driver and limits; else
    the data sheet's, and None for a GPU that is in no table.  A CPU has no unit for products of fp8 or tf32, and their
    rate is then the best of those that were measured, which no widened product can pass.
    """
    if device.type == "cpu":
        return with_stand_ins(cpu_ceilings())
    kept, _ = kept_ceilings(device)
    if kept is not None and kept.ceilings is not None:
        return kept.ceilings
    known = identify(torch.cuda.get_device_name(device))
    return known.ceilings() if known else None


def limits_for(device: torch.device, ceilings: Ceilings) -> Ceilings | None:
    """What no reading on `device` can pass: on a CPU `ceilings`, on CUDA the data sheet's rates at the highest clock.

    L2's rate is that of `ceilings` where the data sheet has none, as a Hopper's; for a GPU that is in no table it is
    the only one, and without it there is None.  No launch floor is among them: that is the timing method's (`Samples`).
    """
    if device.type == "cpu":
        return ceilings
    known = identify(torch.cuda.get_device_name(device))
    if known is not None:
        limits = known.ceilings(known.max_clock_hz)
    elif ceilings.l2_bytes_per_s is not None:
        limits = Ceilings(ceilings.device, ceilings.kind, math.inf, {}, math.inf)
    else:
        return None
    return replace(limits, launch_floor_s=0.0, l2_bytes_per_s=limits.l2_bytes_per_s or ceilings.l2_bytes_per_s)


def kept_ceilings(device: torch.device, folder: Path | None = None) -> tuple[Kept | None, str]:
    """What was measured on this GPU and still counts; else None and why."""
    return ceilings_kept.find(_environment(device.index or 0), folder)


@cache
def _environment(gpu_index: int) -> Environment:
    # Once a process: it asks git and NVML, and a driver or a clock limit does not change under a running process.
    return snapshot(gpu_index)


def cuda_ceilings(
    device: torch.device,
    refresh: bool = False,
    budget_s: float = CUDA_BUDGET_S,
    folder: Path | None = None,
    advance: Callable[[str], None] = lambda limit: None,
) -> Kept:
    """What this GPU was measured to reach; kept, and measured anew with `refresh` or under other circumstances.

    Ceilings that still count are not replaced by a measurement that makes none; what is returned then says so.  Raises
    `ValueError` where CuPy, which launches the microkernels, is not installed.
    """
    kept, _ = kept_ceilings(device, folder)
    if kept is not None and not refresh:
        return kept
    environment = _environment(device.index or 0)
    readings = _measured(device, environment, budget_s, advance)
    found, reason = _assembled(readings, device)
    if found is None and kept is not None and kept.ceilings is not None:
        return ceilings_kept.made_now(environment, readings, None, f"{reason}; those of {kept.made} are kept")
    return ceilings_kept.keep(environment, readings, found, reason, folder)


def _measured(
    device: torch.device, environment: Environment, budget_s: float, advance: Callable[[str], None]
) -> list[Reading]:
    from rooflab.bench.ceilings.cuda import measure_cuda

    known = identify(torch.cuda.get_device_name(device))
    return measure_cuda(
        device,
        budget_s=budget_s,
        limits=known.ceilings(known.max_clock_hz) if known else None,
        uuid=environment.gpu.uuid if environment.gpu else None,
        advance=advance,
    )


def _assembled(readings: Sequence[Reading], device: torch.device) -> tuple[Ceilings | None, str]:
    name = torch.cuda.get_device_name(device)
    known = identify(name)
    major, minor = torch.cuda.get_device_capability(device)
    return assemble(readings, known.name if known else name, 10 * major + minor)


def raise_cuda_ceilings(
    known: Ceilings, device: torch.device, budget_s: float = CUDA_BUDGET_S, folder: Path | None = None
) -> Ceilings:
    """Measures again after a reading above the measured ceilings `known`, and keeps the better reading of each limit.

    No rate of what is returned is below `known`'s.  Where the measurement makes no ceilings, a note says why.
    """
    environment = _environment(device.index or 0)
    try:
        again = _measured(device, environment, budget_s, lambda limit: None)
        _, missing = _assembled(again, device)
        kept, _ = kept_ceilings(device, folder)
        readings = better(kept.readings if kept else (), again)
        found, _ = _assembled(readings, device)
        if found is not None:
            ceilings_kept.keep(environment, readings, found, "", folder)
    except ValueError as error:
        found, missing = None, str(error)
    if missing:
        from rooflab.bench import show  # draws on the terminal

        show.note(f"ceilings: measuring again failed ({missing}); what was measured before still counts")
    return larger(known, found) if found else known


def cpu_ceilings(refresh: bool = False, budget_s: float = 5.0, folder: Path | None = None) -> Ceilings:
    """What this CPU was measured to reach with torch's present threads; read from the cache unless `refresh`.

    Bandwidth: STREAM's copy and triad (McCalpin, 1995; write-allocate not counted, as there), a plain read and a plain
    write, over arrays of at least four times the last-level cache; the best.  No cache has a rate: that of a virtual
    machine is its neighbours' as well.  Matrix rates: the best `torch.mm` or packed oneDNN
    product per dtype.  Vector rate: the fp32 matrix rate, because a CPU computes fp32 products on its vector units, and
    no other torch call keeps them as busy.  Special functions are not measured and bound nothing.  What was measured
    while other processes ran is too low (a tenth was seen), and is measured anew once they are gone.
    """
    known = None if refresh else kept_cpu_ceilings(folder)
    if known is not None:
        return known
    environment = snapshot()
    busy = _busy()
    measured = measure_cpu(environment.cpu, budget_s)
    _save(_path(folder, environment), environment, measured, busy)
    return measured


def kept_cpu_ceilings(folder: Path | None = None) -> Ceilings | None:
    """What was measured on this CPU and still counts."""
    environment = snapshot()
    return _load(_path(folder, environment), environment)


def _busy() -> bool:
    """Whether other processes hold more than a quarter of this machine while this one sleeps."""
    return float(psutil.cpu_percent(interval=0.25)) > 25.0


def raise_cpu_ceilings(known: Ceilings, budget_s: float = 5.0, folder: Path | None = None) -> Ceilings:
    """Measures again after a reading above `known`, and keeps the larger of each rate: a busy machine lowers none."""
    measured = without_stand_ins(known)
    raised = larger(measured, cpu_ceilings(refresh=True, budget_s=budget_s, folder=folder))
    environment = snapshot()
    _save(_path(folder, environment), environment, raised)
    return raised if measured == known else with_stand_ins(raised)


def _path(folder: Path | None, environment: Environment) -> Path:
    return (folder or cache_folder()) / "ceilings" / f"{environment.machine_key}.json"


def measure_cpu(name: str, budget_s: float = 5.0) -> Ceilings:
    """Measures anew in about `budget_s` seconds."""
    access = measure_bandwidth(budget_s * BANDWIDTH_SHARE)
    share = budget_s * (1 - BANDWIDTH_SHARE) / len(DTYPE_NAMES)
    rates = {dtype_name: measure_gemm(dtype, share) for dtype, dtype_name in DTYPE_NAMES.items()}
    return Ceilings(
        device=name,
        kind="measured",
        hbm_bytes_per_s=max(access.values()),
        tensor_flops_per_s=rates,
        vector_flops_per_s=rates["fp32"],
        access_bytes_per_s=access,
    )


def measure_bandwidth(budget_s: float) -> dict[str, float]:
    """Best bytes per second of read, write, copy and triad by all of torch's threads."""
    # STREAM's rule is four times the cache; three arrays together take at most an eighth of the memory.
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
        if "access_bytes_per_s" not in found["ceilings"]:  # of a version that measured no writes
            return None
        return None if found["busy"] and not _busy() else Ceilings(**found["ceilings"])
    except (ValueError, KeyError, TypeError):
        return None  # cut short or of another version: measured anew and overwritten


def _save(path: Path, environment: Environment, measured: Ceilings, busy: bool = False) -> None:
    found = {"environment": environment.to_dict(), "busy": busy, "ceilings": asdict(measured)}
    write_json(path, found)
