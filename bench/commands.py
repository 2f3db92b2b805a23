"""Does the work of the CLI commands, but prints nothing.  The functions return table rows and records."""

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
from rooflab.kernels.tuning import BUCKET_ROWS, bucket_of
from rooflab.reference.spec import get_scheme
from rooflab.roofline.device import resolve

MIN_TIMING_S, TIMING_SHARE = 0.05, 0.3
"""The least seconds for a kernel's samples on a case, and the share of a time limit that samples get.  The rest of the
limit is for inputs, checks and compilation."""


def kernel_rows(ops: Sequence[str] | None = None) -> list[Row]:
    """Returns one row per kernel: op, name, role, backend, available, reason.

    An op without a library kernel, and a plug-in that cannot be imported, also get a row with the reason."""
    device = pick_device(None)
    note_by_kernel = _settled() if device.type == "cpu" else {}
    rows: list[Row] = []
    for op in ops or registry.ops():
        op_spec = registry.get_op(op)
        for kernel in registry.kernels(op).values():
            reason = kernel.why_not_here(device)
            row: Row = {"op": op, "name": kernel.name, "role": kernel.role, "backend": kernel.backend}
            run_note = "interpreted" if device.type == "cpu" and kernel.backend == "triton" else ""
            reason_parts = [str(reason) if reason else note_by_kernel.get(kernel.id, run_note)]
            if device.type == "cpu" and kernel.has_code and (reason is None or reason.status == "UNSUPPORTED"):
                reason_parts.append("`rooflab check` emulates it")
            rows.append(row | {"available": reason is None, "reason": "; ".join(reason_parts)})
        if op_spec.no_library:
            row = {"op": op, "name": "library", "role": "library", "backend": "torch", "available": False}
            rows.append(row | {"reason": f"none in torch: {op_spec.no_library}"})
    for name, refusal in registry.broken_plugins.items():
        row = {"op": "", "name": name, "role": "plug-in", "backend": "", "available": False}
        rows.append(row | {"reason": str(refusal)})
    return rows


def _settled() -> dict[str, str]:
    """Maps each kernel's id to a text with the sizes at which it was the fastest in the engine's newest timings."""
    from rooflab.engine.choose.choose_kernels import PROVISIONAL, known

    timings: dict[str, Json] = next(known(), {"times_us": {}})
    kernel_buckets: dict[str, list[str]] = {}
    for op, op_times in timings["times_us"].items():
        for bucket in map(bucket_of, BUCKET_ROWS):
            if bucket_times := op_times.get(bucket):
                kernel_buckets.setdefault(f"{op}/{min(bucket_times, key=bucket_times.__getitem__)}", []).append(bucket)
    texts = {name: f"fastest for {timings['model']} in {' '.join(buckets)}" for name, buckets in kernel_buckets.items()}
    unsure_kernels = {
        name
        for op, provisional_bucket in timings.get("provisional", ())
        for name in texts
        if name.startswith(f"{op}/") and provisional_bucket in kernel_buckets[name]
    }
    return {name: f"{text} ({PROVISIONAL})" if name in unsure_kernels else text for name, text in texts.items()}


def count_benches(chosen: Selection) -> int:
    """Returns the number of records that `run_benches` makes."""
    scheme = default_scheme(chosen.device)
    op_specs = ((registry.get_op(op), kernels) for op, kernels in _with_baselines(chosen).items())
    return sum(
        len(kernels) * len(chosen.cases_of(spec)) * len(chosen.schemes_of(spec, scheme)) for spec, kernels in op_specs
    )


def _with_baselines(chosen: Selection) -> dict[str, tuple[Kernel, ...]]:
    """Returns, for each op, the selected kernels and all library kernels to compare them with."""
    kernels_by_op = {}
    for op, kernels in chosen.kernels.items():
        library_kernels = [kernel for kernel in registry.kernels(op).values() if kernel.role == "library"]
        kernels_by_op[op] = tuple(dict.fromkeys((*kernels, *library_kernels)))
    return kernels_by_op


def run_benches(
    chosen: Selection,
    settings: Settings,
    writer: RunWriter,
    advance: Callable[[str], None],
    into: list[Record] | None = None,
    planted_before: frozenset[tuple[str, str]] = frozenset(),
) -> list[Record]:
    """Checks and times all selected kernels.  Writes each record at once with `writer`, and appends it to `into`.

    A case is skipped if `into` holds the records of all its kernels.  `planted_before` lists the pairs `(kernel id,
    scheme)` already checked on adversarial inputs.  With a time limit, a broken CUDA context raises `ContextBroken`."""
    check_caches()
    records = [] if into is None else into
    bench_deadline = time.monotonic() + settings.limit_s
    measured_keys = {(record.op, record.kernel, record.case_id, record.scheme) for record in records}
    kernel_budget_s = max(MIN_TIMING_S, TIMING_SHARE * settings.limit_s / max(1, count_benches(chosen)))
    settings = replace(settings, device=str(chosen.device), budget_s=min(settings.budget_s, kernel_budget_s))
    for op, kernels in _with_baselines(chosen).items():
        op_spec = registry.get_op(op)
        for scheme in chosen.schemes_of(op_spec, default_scheme(chosen.device)):
            cases = [
                case
                for case in chosen.cases_of(op_spec)
                if any((op, kernel.name, case.id, scheme.name) not in measured_keys for kernel in kernels)
            ]
            if time.monotonic() > bench_deadline:
                return records
            checked_names = frozenset(kernel.name for kernel in kernels if (kernel.id, scheme.name) in planted_before)
            measurement = Measurement(op_spec, scheme, settings, writer.run_id, planted_before=checked_names)
            for record_index, record in enumerate(measurement.records(kernels, cases)):
                writer.write(record)
                records.append(record)
                advance(f"{op}/{record.kernel} {record.case_id}")
                if (record_index + 1) % len(kernels) == 0 and time.monotonic() > bench_deadline:
                    break
    return records


def newest_records(path: Path | None) -> tuple[list[Record], Path]:
    """Returns the records at `path`, and the folder for figures.  Without `path`, takes the newest local run."""
    if path is None:
        files = sorted(result_folder("local").glob("*/*.jsonl"), key=lambda file: file.stat().st_mtime)
        run_folders = [file.parent for file in files if any(record.kind == "bench" for record in read(file))]
        if not run_folders:
            raise ValueError("records: no local run yet; run `rooflab bench` first, or name a GPU with --gpu")
        path = run_folders[-1]
    return _read(path), path if path.is_dir() else path.parent


def _read(path: Path) -> list[Record]:
    """Reads the records of a file, or of all files under a folder.  Also reads a JSON file of pytest-benchmark."""
    if path.suffix != ".json":
        return read(path, deep=True)
    from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark  # imports pandas and pytest

    return list(read_pytest_benchmark(path).records)


def gpu_bounds(gpu: str, suite: str, scheme: str, ops: Sequence[str]) -> tuple[Drawing, str | None]:
    """Returns the lower bound of every kernel's time on a GPU, and a message if the name `gpu` fits several GPUs."""
    device, gpu_note = resolve(gpu)
    for op in ops:
        registry.get_op(op).get_cases(suite)
    plot_points, ceilings = bounds_on(device, suite, get_scheme(scheme).name, ops)
    return Drawing(plot_points, ceilings, ceilings[0].device), gpu_note


def records_on(gpu: str, records: Sequence[Record], name: str) -> tuple[Drawing, list[str]]:
    """Returns a roofline plot of `records` for the GPU `gpu`, and messages for the user.

    In the messages, `name` stands for the records.

    A time is drawn only if it was measured on this GPU.  A record of the emulator is drawn with its counted bytes.
    Raises `ValueError` if no record can be drawn."""
    device, gpu_note = resolve(gpu)
    plot_points, skip_reasons = placed_on(records, device)
    if not plot_points:
        expected_text = "records of the emulator, or benchmarks with a cost that this GPU can do"
        reason_text = f": {skip_reasons[0]}" if skip_reasons else ""
        raise ValueError(f"records: expected {expected_text}, got none in {name}{reason_text}")
    gpu_notes = [gpu_note] if gpu_note else []
    has_imports = any("imported" in record.environment for record in records)
    if all(plot_point.seconds is None for plot_point in plot_points):
        no_gpu_text = "no GPU, which `import --column gpu==h100` names"
        gpu_names = {str((record.environment.get("gpu") or {}).get("name") or no_gpu_text) for record in records}
        reason_text = f" (its records name {', '.join(sorted(gpu_names))})" if has_imports else ""
        gpu_notes.append(f"nothing in {name} was measured on {device.full_name}{reason_text}, so these are bounds")
    label_suffix = ", imported times" if has_imports and any(plot_point.seconds for plot_point in plot_points) else ""
    return Drawing(plot_points, [device.ceilings()], device.name + label_suffix, unplaced=skip_reasons), gpu_notes
