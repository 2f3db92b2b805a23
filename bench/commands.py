"""Does the work of the commands, and prints nothing.  Functions take selected kernels, and return rows and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rooflab.bench.base.plain import Json, Row
from rooflab.bench.base.system_time import time
from rooflab.bench.core import (
    Measurement,
    Record,
    RunWriter,
    Selection,
    Settings,
    default_scheme,
    pick_device,
    read,
    result_folder,
)
from rooflab.bench.report.figures import Drawing, bounds_on, placed_on
from rooflab.kernels import registry
from rooflab.kernels._folders import check_caches
from rooflab.kernels.registry import Kernel
from rooflab.kernels.tuning import BUCKETS, bucket_of
from rooflab.reference.spec import get_scheme
from rooflab.roofline.device import resolve

LEAST_S, TIMING_SHARE = 0.05, 0.3
"""The least seconds for a kernel's samples on a case, and the share of a time limit that samples get.  The rest of the
limit is for inputs, checks and compilation."""


def kernel_rows(ops: Sequence[str] | None = None) -> list[Row]:
    """Returns one row per kernel: op, name, role, backend, available, reason.

    An op without a library kernel, and a plug-in that cannot be imported, also get a row with the reason."""
    device = pick_device(None)
    serves = _settled() if device.type == "cpu" else {}
    rows: list[Row] = []
    for op in ops or registry.ops():
        spec = registry.get_op(op)
        for kernel in registry.kernels(op).values():
            reason = kernel.why_not_here(device)
            row: Row = {"op": op, "name": kernel.name, "role": kernel.role, "backend": kernel.backend}
            run_note = "interpreted" if device.type == "cpu" and kernel.backend == "triton" else ""
            words = [str(reason) if reason else serves.get(kernel.id, run_note)]
            if device.type == "cpu" and kernel.has_code and (reason is None or reason.status == "UNSUPPORTED"):
                words.append("`rooflab check` emulates it")
            rows.append(row | {"available": reason is None, "reason": "; ".join(words)})
        if spec.no_library:
            row = {"op": op, "name": "library", "role": "library", "backend": "torch", "available": False}
            rows.append(row | {"reason": f"none in torch: {spec.no_library}"})
    for name, refusal in registry.broken_plugins.items():
        row = {"op": "", "name": name, "role": "plug-in", "backend": "", "available": False}
        rows.append(row | {"reason": str(refusal)})
    return rows


def _settled() -> dict[str, str]:
    """Names, for each kernel, the size ranges in which it was fastest for the model that this CPU loaded last."""
    from rooflab.engine.choose.choose_kernels import PROVISIONAL, known

    newest: dict[str, Json] = next(known(), {"times_us": {}})
    buckets: dict[str, list[str]] = {}
    for op, of_op in newest["times_us"].items():
        for bucket in map(bucket_of, BUCKETS):
            if times := of_op.get(bucket):
                buckets.setdefault(f"{op}/{min(times, key=times.__getitem__)}", []).append(bucket)
    texts = {name: f"fastest for {newest['model']} in {' '.join(served)}" for name, served in buckets.items()}
    unsure = {
        name
        for op, unsure_bucket in newest.get("provisional", ())
        for name in texts
        if name.startswith(f"{op}/") and unsure_bucket in buckets[name]
    }
    return {name: f"{text} ({PROVISIONAL})" if name in unsure else text for name, text in texts.items()}


def count_benches(chosen: Selection) -> int:
    """Returns the number of records that `run_benches` makes."""
    default = default_scheme(chosen.device)
    specs = ((registry.get_op(op), kernels) for op, kernels in _with_baselines(chosen).items())
    return sum(
        len(kernels) * len(chosen.cases_of(spec)) * len(chosen.schemes_of(spec, default)) for spec, kernels in specs
    )


def _with_baselines(chosen: Selection) -> dict[str, tuple[Kernel, ...]]:
    """Returns, for each op, the selected kernels and the library kernels, which serve for comparison."""
    by_op = {}
    for op, kernels in chosen.kernels.items():
        library = [kernel for kernel in registry.kernels(op).values() if kernel.role == "library"]
        by_op[op] = tuple(dict.fromkeys((*kernels, *library)))
    return by_op


def run_benches(
    chosen: Selection,
    settings: Settings,
    writer: RunWriter,
    advance: Callable[[str], None],
    into: list[Record] | None = None,
    planted_before: frozenset[tuple[str, str]] = frozenset(),
) -> list[Record]:
    """Checks and times all selected kernels.  Gives each record at once to `writer`, and to the list `into`.

    `planted_before` has the ids and schemes of kernels that were checked before with adversarial inputs.  Records that
    are in `into` at the start are not measured again.  With a time limit, each kernel gets a share of the limit, at
    most the budget.  `ContextBroken` is raised if there is a limit and a kernel has broken the CUDA context."""
    check_caches()
    records = [] if into is None else into
    deadline = time.monotonic() + settings.limit_s
    measured = {(record.op, record.kernel, record.case_id, record.scheme) for record in records}
    share_s = max(LEAST_S, TIMING_SHARE * settings.limit_s / max(1, count_benches(chosen)))
    settings = replace(settings, device=str(chosen.device), budget_s=min(settings.budget_s, share_s))
    for op, kernels in _with_baselines(chosen).items():
        spec = registry.get_op(op)
        for scheme in chosen.schemes_of(spec, default_scheme(chosen.device)):
            cases = [
                case
                for case in chosen.cases_of(spec)
                if any((op, kernel.name, case.id, scheme.name) not in measured for kernel in kernels)
            ]
            if time.monotonic() > deadline:
                return records
            planted = frozenset(kernel.name for kernel in kernels if (kernel.id, scheme.name) in planted_before)
            run = Measurement(spec, scheme, settings, writer.run_id, planted_before=planted)
            for number, record in enumerate(run.records(kernels, cases)):
                writer.write(record)
                records.append(record)
                advance(f"{op}/{record.kernel} {record.case_id}")
                if (number + 1) % len(kernels) == 0 and time.monotonic() > deadline:
                    break
    return records


def newest_records(path: Path | None) -> tuple[list[Record], Path]:
    """Returns the records at `path`, by default of the newest local run.  Also returns the folder for figures."""
    if path is None:
        files = sorted(result_folder("local").glob("*/*.jsonl"), key=lambda file: file.stat().st_mtime)
        runs = [file.parent for file in files if any(record.kind == "bench" for record in read(file))]
        if not runs:
            raise ValueError("records: no local run yet; run `rooflab bench` first, or name a GPU with --gpu")
        path = runs[-1]
    return _read(path), path if path.is_dir() else path.parent


def _read(path: Path) -> list[Record]:
    """Reads the records of a file, or of a folder and its subfolders, or of a JSON file of pytest-benchmark."""
    if path.suffix != ".json":
        return read(path, deep=True)
    from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark  # imports pandas and pytest

    return list(read_pytest_benchmark(path).records)


def gpu_bounds(gpu: str, suite: str, scheme: str, ops: Sequence[str]) -> tuple[Drawing, str | None]:
    """Returns the lower bound of every kernel's time on a GPU, and a message if the name `gpu` fits several GPUs."""
    device, note = resolve(gpu)
    for op in ops:
        registry.get_op(op).get_cases(suite)
    points, ceilings = bounds_on(device, suite, get_scheme(scheme).name, ops)
    return Drawing(points, ceilings, ceilings[0].device), note


def records_on(gpu: str, records: Sequence[Record], name: str) -> tuple[Drawing, list[str]]:
    """Places records in the roofline plot of a GPU; returns the plot and messages.  Emulated calls use their counted
    bytes, benchmarks their times if such a GPU was used.  Raises `ValueError` with `name` if no record can be placed.
    """
    device, note = resolve(gpu)
    points, unplaced = placed_on(records, device)
    if not points:
        expected = "records of the emulator, or benchmarks with a cost that this GPU can do"
        reason = f": {unplaced[0]}" if unplaced else ""
        raise ValueError(f"records: expected {expected}, got none in {name}{reason}")
    notes = [note] if note else []
    imported = any("imported" in record.environment for record in records)
    if all(point.seconds is None for point in points):
        lacks = "no GPU, which `import --column gpu==h100` names"
        cards = {str((record.environment.get("gpu") or {}).get("name") or lacks) for record in records}
        reason = f" (its records name {', '.join(sorted(cards))})" if imported else ""
        notes.append(f"nothing in {name} was measured on {device.full_name}{reason}, so these are bounds")
    suffix = ", imported times" if imported and any(point.seconds for point in points) else ""
    return Drawing(points, [device.ceilings()], device.name + suffix, unplaced=unplaced), notes
