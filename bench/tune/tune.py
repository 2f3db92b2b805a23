"""`rooflab tune`: searches a kernel's configs on this device, and measures the best configs like all other kernels.

The search never compiles configs that cannot run (`is_legal`) or whose own bound is above the best time.  It drops
configs whose first samples are far slower (`search.py`).  `measure_op` checks and times the few that are left, together
with the launcher's own choice and the op's other kernels.  The records of these configs hold their `config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core import Environment, RunWriter, Selection, default_scheme, pick_device
from rooflab.bench.tune.bucket import TuningRun
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.kernels.tuning import bucket_of, rows_of
from rooflab.reference.spec import Case

SUITES = {"cuda": "llama3_8b", "cpu": "smollm2_135m"}
"""By device, the suite whose cases are tuned if the user names no case."""
COLUMNS = ("kernel", "bucket", "cases", "configs", "illegal", "bounded", "dropped", "failed", "left", "result")


def tune_op(
    op: str,
    kernels: Sequence[str] = (),
    *,
    suites: Sequence[str] = (),
    cases: Sequence[str] = (),
    scheme: str | None = None,
    budget_s: float = 120.0,
    device: str | None = None,
    out: Path,
    dry_run: bool = False,
    seed: int = 0,
    clean: bool = False,
) -> TuningRun:
    """Searches the configs of `kernels` (by default all tunable kernels of `op`) in about `budget_s` seconds.

    A dry run times nothing: it invents times, checks the winner on one small case, and writes no record.  `clean`
    requires a committed tree.  Raises `ValueError` on a kernel that takes no config or cannot be timed on this device.
    """
    if not budget_s > 0:
        raise ValueError(f"budget: expected seconds above 0, got {budget_s}")
    here = Environment.now() if clean else None
    if here and (here.dirty or here.commit is None):
        raise ValueError("choose: expected a committed tree, so that its records name the code; commit first")
    place = "cpu" if dry_run else device
    suite = SUITES[pick_device(place).type]
    chosen = Selection.of(
        op, kernels or None, suites or [suite], cases or None, [scheme] if scheme else None, place, seed
    )
    spec = registry.get_op(op)
    tunable = _tunable(op, chosen.kernels[op], bool(kernels))
    if not dry_run:
        for kernel in tunable:
            _check_timed_here(kernel, chosen.device)
    schemes = chosen.schemes_of(spec, default_scheme(chosen.device))
    if not schemes:
        raise ValueError(f"scheme: {op} has {', '.join(spec.schemes)}, got {scheme!r}")
    beside = [] if dry_run else _others(op, tunable, chosen.device)
    run = TuningRun(spec, tunable, beside, schemes[0], chosen.device, RunWriter(out), seed, dry_run)
    buckets = _by_bucket(op, chosen.cases_of(spec))
    ends = time.monotonic() + budget_s
    for number, (name, own_cases) in enumerate(buckets.items()):
        left = ends - time.monotonic()
        if left <= 0:
            run.stopped = f"the budget ended after {number} of {len(buckets)} buckets"
            break
        run.bucket(name, own_cases, left / (len(buckets) - number))
    return run


def _by_bucket(op: str, cases: Iterable[Case]) -> dict[str, list[Case]]:
    buckets: dict[str, list[Case]] = {}
    for case in cases:
        if (rows := rows_of(case)) is None:
            expected = "expected one of M, T, B to say its rows, by which configs are chosen"
            raise ValueError(f"case: {expected}; {op} has {case.id}")
        buckets.setdefault(bucket_of(rows), []).append(case)
    return buckets


def _tunable(op: str, kernels: Sequence[Kernel], named: bool) -> list[Kernel]:
    for kernel in kernels:
        if named and kernel.tuning is None:
            raise ValueError(f"kernel: expected a tunable one, got {kernel.id}, which takes no config")
    tunable = [kernel for kernel in kernels if kernel.tuning is not None and kernel.id not in registry.excluded()]
    if not tunable:
        raise ValueError(f"kernel: expected a tunable one, and no kernel of {op} takes a config")
    return tunable


def _check_timed_here(kernel: Kernel, device: torch.device) -> None:
    reason = str(kernel.why_not_here(device) or "")
    if device.type == "cpu" and kernel.backend not in registry.CPU_BACKENDS:
        reason = "UNSUPPORTED: needs a CUDA device; on a CPU it runs in an interpreter, whose time is not the kernel's"
    if reason:
        raise ValueError(f"tune: {kernel.id} cannot be timed here: {reason}; --dry-run searches with made-up times")


def _others(op: str, tunable: Sequence[Kernel], device: torch.device) -> list[Kernel]:
    """The op's other kernels that can be timed here."""
    return [
        kernel
        for kernel in registry.kernels(op).values()
        if kernel.name not in {other.name for other in tunable}
        and kernel.role in ("library", "optimized")
        and kernel.why_not_here(device) is None
        and (device.type == "cuda" or kernel.backend in registry.CPU_BACKENDS)
    ]
