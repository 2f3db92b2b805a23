"""The work of the commands, without drawing: they take selections, and return rows and records."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, cast, get_args

import torch

from rooflab.bench.calls.selection import Selection, default_scheme, file_of, pick_device
from rooflab.bench.check.check import BROKEN, CheckResult, already_broken, check_record
from rooflab.bench.check.drawn import HOW, IN_SOFTWARE, ON_HARDWARE, Most, drawn_points, most_different, smallest
from rooflab.bench.check.runs import Planted
from rooflab.bench.check.spread import Asked, Checkers, in_turn
from rooflab.bench.compile.cases import has_code
from rooflab.bench.emulate.checks import emulators
from rooflab.bench.measure.engine_run import as_prompt, engine_record, kernel_names, stream_one, warm_up
from rooflab.bench.measure.measure import measure_op
from rooflab.bench.processes.child import cores
from rooflab.bench.processes.running import ContextBroken, note
from rooflab.bench.records import files as record_files
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import RunWriter, local_results
from rooflab.bench.records.record import NOT_RUN, Record
from rooflab.bench.report.figures import Drawing, bounds_on, counted_in, measured_bounds
from rooflab.bench.timing.clocks import locked_clocks
from rooflab.bench.timing.stopwatch import FlushBy
from rooflab.bench.timing.timing import check_timer
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.kernels import registry
from rooflab.kernels._folders import check_caches
from rooflab.kernels.choices import all_buckets
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import resolve

LEAST_S, TIMING_SHARE = 0.05, 0.3
"""Least seconds for the samples of a kernel on a case, and the share of a limit that goes to samples; the rest goes to
inputs, checks and compilation."""


def kernel_rows(ops: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One row per kernel: op, name, role, backend, available, reason.

    A missing library kernel has a row too, and so has a plug-in that cannot be imported.
    """
    device = pick_device(None)
    serves = _settled() if device.type == "cpu" else {}
    rows: list[dict[str, Any]] = []
    for op in ops or registry.ops():
        spec = registry.get_op(op)
        for kernel in registry.kernels(op).values():
            reason = kernel.why_not_here(device)
            row: dict[str, Any] = {"op": op, "name": kernel.name, "role": kernel.role, "backend": kernel.backend}
            here = "interpreted" if device.type == "cpu" and kernel.backend == "triton" else ""
            words = [str(reason) if reason else serves.get(kernel.id, here)]
            if device.type == "cpu" and has_code(kernel) and (reason is None or reason.status == "UNSUPPORTED"):
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
    """By kernel, the buckets that it serves in the model that was loaded last on this CPU."""
    from rooflab.engine.settle import PROVISIONAL, known

    newest: dict[str, Any] = next(known(), {"times_us": {}})
    buckets: dict[str, list[str]] = {}
    order = [name for name, _, _ in all_buckets()]
    for op, of_op in newest["times_us"].items():
        for bucket, times in sorted(of_op.items(), key=lambda item: order.index(item[0])):
            buckets.setdefault(f"{op}/{min(times, key=times.__getitem__)}", []).append(bucket)
    told = {name: f"fastest for {newest['model']} in {' '.join(own)}" for name, own in buckets.items()}
    unsure = {
        name
        for op, at in newest.get("provisional", ())
        for name in told
        if name.startswith(f"{op}/") and at in buckets[name]
    }
    return {name: f"{text} ({PROVISIONAL})" if name in unsure else text for name, text in told.items()}


def listed_checks(chosen: Selection) -> list[Asked]:
    """Every kernel of a selection on every case of it, in every scheme."""
    return [
        Asked(kernel, case, scheme, chosen.seed)
        for op, kernels in chosen.kernels.items()
        for case in chosen.cases_of(registry.get_op(op))
        for scheme in chosen.schemes_of(registry.get_op(op))
        for kernel in kernels
    ]


def drawn_checks(chosen: Selection, every: bool = False) -> list[Asked]:
    """The kernels of a selection on the domain of their op.

    The smoke cases come first, in every scheme. Then edge cases, the most different first, and cases that the seed
    draws follow in turn, each in one scheme, the next one in the next scheme. A drawn case is passed in one of the ways
    of `OTHERWISE` too, and has one planted set; a kernel that runs in software has all sets only on smoke cases: in
    every scheme on the first, in the last scheme on the others. With `every`, edge cases run in every scheme, and all
    of the op's own cases with all planted inputs.
    """
    found = []
    for op, kernels in chosen.kernels.items():
        spec = registry.get_op(op)
        schemes = chosen.schemes_of(spec)
        limits = {_most(kernel, chosen.device) for kernel in kernels}
        drawn = {most: drawn_points(spec, chosen.seed, most) for most in limits}
        for kernel in kernels if schemes else ():
            most = _most(kernel, chosen.device)
            often = every or most == ON_HARDWARE
            for case, scheme in product(spec.cases["smoke"], schemes):
                whole = often or case == spec.cases["smoke"][0] or scheme == schemes[-1]
                found.append(Asked(kernel, case, scheme, chosen.seed, whole))
            for turn, (edge, point) in enumerate(zip_longest(most_different(spec.cases_in("edge")), drawn[most])):
                scheme = schemes[turn % len(schemes)]
                for each in (schemes if every else (scheme,)) if edge is not None else ():
                    found.append(Asked(kernel, edge, each, chosen.seed, planted=often))
                if point is not None:
                    found.append(Asked(kernel, point.case, scheme, chosen.seed, cast(Planted, point.values[HOW])))
    return found


def _most(kernel: Kernel, device: torch.device) -> Most:
    return IN_SOFTWARE if device.type == "cpu" and has_code(kernel) else ON_HARDWARE


def run_checks(
    checks: Sequence[Asked],
    device: torch.device,
    writer: RunWriter | None,
    done: Callable[[CheckResult], None],
    *,
    emulate: bool = False,
    limit_s: float = math.inf,
    into: dict[int, CheckResult] | None = None,
) -> list[CheckResult]:
    """Makes checks, and calls `done` with each result as it comes.

    The kernels run in child processes, on a CPU on all cores; with `emulate`, those that have compiled code run in the
    emulator. With a limit, the kernels take turns, and results are left out as `in_turn` says; the time counts from
    when the processes have started. Otherwise interpreted kernels come first, because they take
    longest. Gives a record of each check to `writer` at once. Returns the results in the order of `checks`, and puts
    each at once `into` its place.
    """
    environment = snapshot(device.index or 0)
    ranks = (
        [item.kernel.backend in registry.CPU_BACKENDS for item in checks] if limit_s == math.inf else turns_of(checks)
    )
    order = sorted(range(len(checks)), key=ranks.__getitem__)
    results = {} if into is None else into
    workers = cores() if device.type == "cpu" else 1
    with _checkers(device, emulate) as check:
        check.start(checks, workers)
        for index, found in in_turn([checks[place] for place in order], check, workers, limit_s):
            results[order[index]] = found
            if writer:
                writer.write(check_record(found, checks[order[index]].kernel, writer.run_id, environment))
            done(found)
    return [results[place] for place in sorted(results)]


def turns_of(checks: Sequence[Asked]) -> list[int]:
    """The turn of each check among those of its kernel, of which the first that the kernel takes comes first."""
    turns, begun, found = Counter[str](), set[str](), []
    for item in checks:
        name, spec = item.kernel.id, registry.get_op(item.kernel.op)
        inputs = {} if name in begun else spec.make_inputs(item.case, item.scheme, torch.device("meta"), item.seed)
        first = bool(inputs) and item.kernel.why_not_args(inputs, spec) is None
        begun |= {name} if first else set()
        turns[name] += 1
        found.append(0 if first else turns[name])
    return found


def _checkers(device: torch.device, emulate: bool) -> Checkers:
    return Checkers(device, lambda item: emulators() if emulate and has_code(item.kernel) else None)


def smallest_failures(
    failures: Sequence[CheckResult], device: torch.device, emulate: bool, limit_s: float
) -> Iterator[str]:
    """For each failure the command that shows it; drawn cases are made as small as they still fail, within `limit_s`
    seconds in all."""
    asked = [
        Asked(
            registry.get_kernel(failed.op, failed.kernel),
            failed.case,
            get_scheme(failed.scheme),
            failed.seed,
            failed.beyond,
        )
        for failed in failures
    ]
    with _checkers(device, emulate) as check:
        check.start(asked, 1)
        ends = time.monotonic() + limit_s

        def fails(item: Asked, status: str, case: Case) -> bool:
            found = in_turn([item._replace(case=case)], check, 1, ends - time.monotonic())
            return status in [result.status for _, result in found]

        for failed, item in zip(failures, asked, strict=True):
            spec, most, case = registry.get_op(failed.op), _most(item.kernel, device), failed.case
            for point in drawn_points(spec, failed.seed, most):
                if point.case == failed.case:
                    case = smallest(spec, point, most, partial(fails, item, failed.status))
            named = f"--kernel {file_of(item.kernel) or failed.kernel} --case {case.id} --scheme {failed.scheme}"
            yield f"rooflab check {failed.op} {named} --seed {failed.seed}"


def check_rows(results: Iterable[CheckResult]) -> list[dict[str, Any]]:
    """One row per check."""
    names = ("scheme", "seed", "status", "checked_by", "discriminating", "weak", "reason")
    return [
        {"op": result.op, "kernel": result.kernel, "case": result.case.id}
        | {"error_over_tolerance": max((error.max_error_over_tolerance for error in result.errors), default=None)}
        | {name: getattr(result, name) for name in names}
        for result in results
    ]


def summarize_checks(results: Sequence[CheckResult], asked: Sequence[Asked] = ()) -> list[dict[str, Any]]:
    """One row per kernel: the numbers of right and wrong cases, and the worst error of all cases.  Kernels of `asked`
    without a result have a row too; one is `unknown` if checks were left out and no result says whether it is right."""
    rows = []
    counts = Counter((item.kernel.op, item.kernel.name) for item in asked)
    for op, name in dict.fromkeys([*counts, *((result.op, result.kernel) for result in results)]):
        own = [result for result in results if (result.op, result.kernel) == (op, name)]
        ran = [result for result in own if result.status not in NOT_RUN]
        errors = [error.max_error_over_tolerance for result in ran for error in result.errors]
        skipped = [result.reason for result in own if result.status in NOT_RUN]
        rows.append(
            {
                "op": op,
                "kernel": name,
                "role": registry.get_kernel(op, name).role,
                "ok": sum(result.status == "OK" for result in ran),
                "failed": sum(result.status != "OK" for result in ran),
                "not run": len(skipped),
                "left out": (left_out := max(0, counts[op, name] - len(own))),
                "unknown": bool(left_out) and all(result.not_offered for result in own),
                "checked_by": " ".join(dict.fromkeys(result.checked_by for result in ran)) or "none",
                "worst": max(errors, default=None),
                "weak": sum(not result.discriminating for result in ran),
                "reason": "; ".join(dict.fromkeys(skipped)),
            }
        )
    return rows


def count_benches(chosen: Selection) -> int:
    """The number of records of `run_benches`."""
    default = default_scheme(chosen.device)
    specs = ((registry.get_op(op), kernels) for op, kernels in _with_baselines(chosen).items())
    return sum(
        len(kernels) * len(chosen.cases_of(spec)) * len(chosen.schemes_of(spec, default)) for spec, kernels in specs
    )


def _with_baselines(chosen: Selection) -> dict[str, tuple[Kernel, ...]]:
    """The kernels of the selection, and the library kernel of each op, for comparison."""
    by_op = {}
    for op, kernels in chosen.kernels.items():
        library = [kernel for kernel in registry.kernels(op).values() if kernel.role == "library"]
        by_op[op] = tuple(dict.fromkeys((*kernels, *library)))
    return by_op


def run_benches(
    chosen: Selection,
    writer: RunWriter,
    budget_s: float,
    advance: Callable[[str], None],
    *,
    into: list[Record] | None = None,
    timer: str | None = None,
    flush: FlushBy = "read",
    lock_clocks: bool = False,
    planted_before: frozenset[tuple[str, str]] = frozenset(),
    seconds: float = math.inf,
) -> list[Record]:
    """Checks and times all kernels of a selection, and gives each record to `writer`, and to `into`, at once.

    `timer` and `flush` are those of `time_functions`; `lock_clocks` holds the GPU's SM clock meanwhile;
    `planted_before` has the ids and schemes of checks with planted inputs that were made before.  What `into` holds at
    the start is not measured again.  No case begins after `seconds`, and with a limit a kernel gets its share of it
    where that is less than the budget.  Raises `ValueError` on a timer that the device does not have, or if its clocks
    cannot be locked, and `ContextBroken` with a limit, if a kernel has broken the CUDA context.
    """
    if not budget_s > 0:
        raise ValueError(f"budget: expected seconds above 0, got {budget_s}")
    check_caches()
    check_timer(timer, chosen.device.type)
    if flush not in get_args(FlushBy):
        raise ValueError(f"flush: expected one of {', '.join(get_args(FlushBy))}, got {flush!r}")
    records, ends = [] if into is None else into, time.monotonic() + seconds
    known = {(record.op, record.kernel, record.case_id, record.scheme) for record in records}
    budget_s = min(budget_s, max(LEAST_S, TIMING_SHARE * seconds / max(1, count_benches(chosen))))
    with _locked(chosen.device) if lock_clocks else nullcontext() as clock_mhz:
        options: dict[str, Any] = {"timer": timer, "flush": flush, "locked_sm_clock_mhz": clock_mhz}
        options |= {"budget_s": budget_s, "run_id": writer.run_id, "seed": chosen.seed}
        for op, kernels in _with_baselines(chosen).items():
            spec = registry.get_op(op)
            for scheme in chosen.schemes_of(spec, default_scheme(chosen.device)):
                options["planted_before"] = frozenset(k.name for k in kernels if (k.id, scheme.name) in planted_before)
                cases = [
                    case
                    for case in chosen.cases_of(spec)
                    if any((op, kernel.name, case.id, scheme.name) not in known for kernel in kernels)
                ]
                if time.monotonic() > ends:
                    return records
                for number, record in enumerate(measure_op(spec, kernels, cases, scheme, chosen.device, **options)):
                    if seconds < math.inf and record.reason.startswith(BROKEN):
                        raise ContextBroken(record.reason)  # by another kernel, of which alone it says something
                    writer.write(record)
                    records.append(record)
                    advance(f"{op}/{record.kernel} {record.case_id}")
                    if (number + 1) % len(kernels) == 0 and time.monotonic() > ends:
                        break
                note(())
                if seconds < math.inf and (broken := already_broken(chosen.device)):
                    raise ContextBroken(broken)
    return records


def _locked(device: torch.device) -> AbstractContextManager[float]:
    gpu = snapshot(device.index or 0).gpu if device.type == "cuda" else None
    if gpu is None:
        raise ValueError(f"lock-clocks: expected a CUDA device, got {device.type}")
    from rooflab.bench.timing.sm_clock import sm_clock_under_load  # imports Triton

    return locked_clocks(gpu.uuid, partial(sm_clock_under_load, device))


def newest_records(path: Path | None) -> tuple[list[Record], Path]:
    """The records at `path` or, without one, of the newest local run; and the folder for their figures."""
    if path is None:
        files = sorted(local_results().glob("*/*.jsonl"), key=lambda file: file.stat().st_mtime)
        runs = [file.parent for file in files if any(record.kind == "bench" for record in record_files.read(file))]
        if not runs:
            raise ValueError("records: no local run yet; run `rooflab bench` first, or name a GPU with --gpu")
        path = runs[-1]
    return _read(path), path if path.is_dir() else path.parent


def _read(path: Path) -> list[Record]:
    """Records, or the benchmarks in a JSON file of pytest-benchmark."""
    if path.suffix != ".json":
        return record_files.read(path)
    from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark  # imports pandas and pytest

    return list(read_pytest_benchmark(path).records)


def gpu_bounds(
    gpu: str, suite: str, scheme: str, ops: Sequence[str], path: Path | None = None
) -> tuple[Drawing, str | None]:
    """Every kernel's bound on a GPU, and a note if the GPU's name fits several or nothing was measured there.

    `path`: records of the emulator, with the kernels' counted bytes, or of benchmarks, whose times are shown if such a
    GPU took them.  Raises `ValueError` if there are neither.
    """
    records = _read(path) if path is not None else []
    counted = counted_in(records)
    device, note = resolve(gpu)
    if path is not None and not counted:
        points = measured_bounds([record for record in records if not ops or record.op in ops], device)
        if not points:
            wanted = "records of the emulator, or benchmarks with a cost that this GPU can do"
            raise ValueError(f"records: expected {wanted}, got none in {path}")
        if all(point.seconds is None for point in points):
            note = f"{note}; " if note else ""
            note += f"nothing in {path.name} was measured on {device.full_name}, so these are bounds"
        return Drawing(points, [device.ceilings()], device.name), note
    for op in ops:
        registry.get_op(op).get_cases(suite)
    points, ceilings = bounds_on(device, suite, get_scheme(scheme).name, ops, counted)
    return Drawing(points, ceilings, ceilings[0].device), note


def generate_one(
    llm: LLM, prompt: str, params: SamplingParams, raw: bool, show: Callable[[str], None], out: Path | None
) -> dict[str, Any]:
    """Answers one prompt and shows its text as it comes; with `out`, writes the record.

    If Triton's interpreter runs kernels, the result has no times: they would be the interpreter's.
    """
    timed = llm.device.type != "cpu" or all(
        choice.kernel.backend in registry.CPU_BACKENDS for choice in llm.ops.choices
    )
    if timed:
        warm_up(llm)
    run = stream_one(llm, as_prompt(llm, prompt, raw), params, lambda event: show(event.text))
    (output,) = run.outputs
    result = {
        "model": llm.arch.name,
        "device": llm.device.type,
        "dtype": llm.dtype_name,
        "text": output["text"],
        "token_ids": output["token_ids"],
        "finish_reason": output["finish_reason"],
        "prompt_tokens": len(output.prompt_token_ids),
        "kernels": kernel_names(llm),
    }
    if timed:
        result |= {**asdict(run.summary), "status": run.status, "reason": run.noise}
        if out:
            writer = RunWriter(out)
            writer.write(engine_record(llm, run, "generate", {"max_tokens": params.max_tokens}, writer.run_id))
    return result
