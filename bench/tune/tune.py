"""Implements `rooflab tune`, which searches the best configs of a kernel on this device and measures them.

The search compiles only configs that can run (`is_legal`) and can be faster than the best one.  It drops a config after
a few far slower samples (`search.py`).  `Measurement` checks and times the rest, together with the launcher's own
choice and the op's other kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core import Measurement, RunWriter, Selection, default_scheme, pick_device
from rooflab.bench.tune.bucket import TuningRun
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.kernels.tuning import bucket_of, rows_of
from rooflab.reference.spec import Case

DEFAULT_SUITES = {"cuda": "llama3_8b", "cpu": "smollm2_135m"}
"""By device, the suite whose cases are tuned if the user names no case."""
TABLE_COLUMNS = ("kernel", "bucket", "cases", "configs", "illegal", "bounded", "dropped", "failed", "left", "result")


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
) -> TuningRun:
    """Searches the configs of `kernels` in about `budget_s` seconds.  The default is all tunable kernels of `op`.

    A dry run invents times and writes no record.  Raises `ValueError` if a kernel has no configs or cannot be timed."""
    if not budget_s > 0:
        raise ValueError(f"budget: expected seconds above 0, got {budget_s}")
    device_name = "cpu" if dry_run else device
    suite = DEFAULT_SUITES[pick_device(device_name).type]
    chosen_set = Selection.of(
        op, kernels or None, suites or [suite], cases or None, [scheme] if scheme else None, device_name, seed
    )
    spec = registry.get_op(op)
    tunable = _tunable(op, chosen_set.kernels[op], bool(kernels))
    if not dry_run:
        for kernel in tunable:
            if refusal := Measurement.why_not(kernel, chosen_set.device):
                advice = "--dry-run searches with made-up times"
                raise ValueError(
                    f"tune: {kernel.id} cannot be timed here: {refusal.status}: {refusal.reason}; {advice}"
                )
    schemes = chosen_set.schemes_of(spec, default_scheme(chosen_set.device))
    if not schemes:
        raise ValueError(f"scheme: {op} has {', '.join(spec.schemes)}, got {scheme!r}")
    other_kernels = [] if dry_run else _others(op, tunable, chosen_set.device)
    tuning_run = TuningRun(spec, tunable, other_kernels, schemes[0], chosen_set.device, RunWriter(out), seed, dry_run)
    buckets = _by_bucket(op, chosen_set.cases_of(spec))
    end_time_s = time.monotonic() + budget_s
    for bucket_index, (name, bucket_cases) in enumerate(buckets.items()):
        remaining_s = end_time_s - time.monotonic()
        if remaining_s <= 0:
            tuning_run.stopped = f"the budget ended after {bucket_index} of {len(buckets)} buckets"
            break
        tuning_run.bucket(name, bucket_cases, remaining_s / (len(buckets) - bucket_index))
    return tuning_run


def _by_bucket(op: str, cases: Iterable[Case]) -> dict[str, list[Case]]:
    buckets: dict[str, list[Case]] = {}
    for case in cases:
        if (num_rows := rows_of(case)) is None:
            expected_text = "expected one of M, T, B to say its rows, by which configs are chosen"
            raise ValueError(f"case: {expected_text}; {op} has {case.id}")
        buckets.setdefault(bucket_of(num_rows), []).append(case)
    return buckets


def _tunable(op: str, kernels: Sequence[Kernel], named: bool) -> list[Kernel]:
    for kernel in kernels:
        if named and kernel.tuning is None:
            raise ValueError(f"kernel: expected a tunable one, got {kernel.id}, which takes no config")
    tunable = [kernel for kernel in kernels if kernel.tuning is not None and kernel.id not in registry.excluded()]
    if not tunable:
        raise ValueError(f"kernel: expected a tunable one, and no kernel of {op} takes a config")
    return tunable


def _others(op: str, tunable: Sequence[Kernel], device: torch.device) -> list[Kernel]:
    """Returns the op's library and optimized kernels that this device can time, without the kernels tuned here."""
    return [
        kernel
        for kernel in registry.kernels(op).values()
        if kernel.name not in {tuned_kernel.name for tuned_kernel in tunable}
        and kernel.role in ("library", "optimized")
        and Measurement.why_not(kernel, device) is None
    ]
