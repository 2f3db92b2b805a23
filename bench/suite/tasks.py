"""The work of the entries that are not bars: the card, the first checks of kernels, all checks, and all times."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch

from rooflab.bench.calls.selection import Selection, default_scheme, first_taken
from rooflab.bench.ceilings.ceilings import find
from rooflab.bench.check.check import CheckResult, already_broken, check_kernel, check_record
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import NOT_RUN, Record, Status
from rooflab.bench.suite.entries import Context, EntryStatus, Outcome
from rooflab.bench.suite.measures import measure, usable, written_before
from rooflab.bench.suite.rehearse import rehearse
from rooflab.bench.suite.running import ContextBroken, Running, clear_running
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

NO_FAULT: tuple[Status, ...] = ("INVALID", "NOISY", "OUT_OF_MEMORY")
"""Not faults at a model's shapes: a kernel with an impossible or noisy reading, or too large a case, may be right
elsewhere."""
RISK = ("triton", "cuda", "gluon")
"""Backends, in the order of first checks: a kernel that hangs takes the card's time from those that run beside it, and
barriers hang."""
FIRST_CHECK_S = 60.0
"""Seconds after which a first check counts as hung: it compiles one kernel and runs it on one small case."""
AT_ONCE = 12
"""Most first checks at the same time; each holds a CUDA context of half a GB, and none is timed."""
PACKAGES = ("cupy", "pynvml", "plotly", "junitparser", "pytest_benchmark", "gguf", "transformers")
"""Packages that some commands need in addition to torch and triton."""


def environment(context: Context) -> Outcome:
    """The machine and its software, written to `environment.json`, and whether the device answers at all."""
    found = snapshot()
    if context.device == "cuda" and found.gpu is None:
        return Outcome("FAILED", "torch finds no CUDA device")
    write_whole(context.out / "environment.json", json.dumps(found.to_dict(), indent=1) + "\n")
    figures: dict[str, Any] = {"python": found.python, "torch": found.torch, "triton": found.triton}
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        figures["not installed"] = ", ".join(missing)
    if found.gpu is not None:
        from rooflab.roofline.device import identify

        known = identify(found.gpu.name)
        figures |= {"gpu": found.gpu.name, "driver": found.gpu.driver, "l2_bytes": found.gpu.l2_bytes}
        figures["l2_bytes in roofline/device.py"] = known.l2_bytes if known else None
    reason = _answers(torch.device(context.device))
    return Outcome("FAILED" if reason else "DONE", reason, figures=figures, files=("environment.json",))


def identify(context: Context) -> Outcome:
    """What a run must share with the run that it continues; the runner asks before the first entry."""
    environment = snapshot()
    return Outcome(figures={"environment": environment.to_dict(), "ceilings": find(environment)[0] is not None})


def probe(context: Context) -> Outcome:
    """Whether the device still answers; asked after an entry was ended by force."""
    reason = _answers(torch.device(context.device))
    return Outcome("FAILED" if reason else "DONE", reason)


def _answers(device: torch.device) -> str:
    ones = torch.ones(1000, 1000, device=device)
    total = float((ones @ ones).sum())
    return "" if total == 1e9 else f"the device computes {total} where 1e9 was expected"


def first_checks(context: Context, ops: Sequence[str]) -> Outcome:
    """Runs each kernel on one small case that it takes, in its own process with a time limit, before any entry runs it.

    A wrong barrier hangs, and an illegal access poisons a process; neither may reach an entry.  Kernels that only call
    torch count as safe, and so does code that passed before on a card of this kind.  A check that cannot be made is
    the failure of its kernel alone.
    """
    from rooflab.bench.check.isolated import CODE, Passed, first_in_own_process

    device, found = torch.device(context.device), snapshot()
    passed, writer = Passed(found), RunWriter(context.out)
    kernels = [kernel for op in ops for kernel in registry.kernels(op).values()]
    safe = [kernel for kernel in kernels if kernel.backend == "torch"]
    risky = sorted((k for k in kernels if k.backend not in registry.CPU_BACKENDS), key=lambda k: RISK.index(k.backend))
    if context.dry_run:
        risky = risky[:1]  # each process takes seconds, and the path is the same for all kernels
    elif context.trust:
        passed.trust(Path(context.trust))
    before = [kernel for kernel in risky if not context.dry_run and passed.holds(kernel)]
    absent = {} if context.dry_run else {kernel.id: why for kernel in risky if (why := kernel.why_not_here(device))}
    left = [kernel for kernel in risky if kernel not in before and kernel.id not in absent]
    asked = [(kernel, taken) for kernel in left if (taken := first_taken(kernel, default_scheme(device)))]

    def attempt(kernel: Kernel, taken: tuple[Case, Scheme]) -> CheckResult | None:
        return None if context.left_s < 0 else first_in_own_process(kernel, *taken, FIRST_CHECK_S, device=device.type)

    excluded: dict[str, str] = {}
    good: list[Kernel] = []
    late: list[str] = []
    with ThreadPoolExecutor(min(AT_ONCE, max(1, 3 * (psutil.cpu_count() or 2) // 4))) as pool:
        making = {pool.submit(attempt, *one): one[0] for one in asked}
        for future in as_completed(making):
            kernel, error = making[future], future.exception()
            if error is not None:  # of whatever kind: it must not end the checks of the other kernels
                excluded[kernel.id] = f"{type(error).__name__}: {error}"
            elif (result := future.result()) is None:
                late.append(kernel.id)
            else:
                record = check_record(result, kernel, writer.run_id, found)
                writer.write(replace(record, environment={**record.environment, CODE: passed.code(kernel)}))
                if result.status == "OK":
                    good.append(kernel)
                elif result.status not in NOT_RUN:
                    excluded[kernel.id] = f"{result.status}: {result.reason}"
    if not context.dry_run:
        for kernel in good:
            passed.add(kernel)
    faults = [f"{name}: {text}" for name, text in excluded.items()]
    reason = "; ".join(faults + [f"no time for {name}" for name in late])
    figures = {"right": len(good) + len(before), "right before": len(before), "excluded": len(excluded)}
    figures["not here"] = len(risky) - len(good) - len(before) - len(excluded) - len(late)
    verified = kernels if context.dry_run else [*safe, *before, *good]
    status: EntryStatus = "PARTIAL" if late else "DONE"
    files = (writer.path.name,) if writer.path.is_file() else ()
    names = tuple(kernel.id for kernel in verified)
    return Outcome(status, reason, figures=figures, files=files, excluded=excluded, verified=names)


def check(context: Context, op: str) -> Outcome:
    """Every kernel of `op` on all smoke and edge cases in every scheme, planted inputs included."""
    kernels = usable(context, op)
    spec = registry.get_op(op)
    device = torch.device(context.device)
    cases = spec.get_cases("smoke")[:1] if context.dry_run else ()
    schemes = ("fp32",) if context.dry_run else ()
    if context.dry_run:
        # One kernel of each backend: in Triton's interpreter some rungs take seconds for a case.
        kernels = list({kernel.backend: kernel for kernel in kernels}.values())
    chosen = Selection({op: tuple(kernels)}, ("smoke", "edge"), cases, schemes, device, context.seed)
    if device.type == "meta":
        rehearse(kernels, chosen.cases_of(spec), chosen.schemes_of(spec))
        return Outcome()
    writer = RunWriter(context.out, context.run_id)
    records = written_before(writer)
    known = {(record.kernel, record.case_id, record.scheme) for record in records}
    found, now = snapshot(), Running(context.entry, files=(writer.path.name,))
    # All kernels of a case in a row: they share its oracle.
    every = product(chosen.cases_of(spec), chosen.schemes_of(spec), kernels)
    left = [one for one in every if (one[2].name, one[0].id, one[1].name) not in known]
    total = len(records) + len(left)
    for case, scheme, kernel in left:
        if context.left_s < 0:
            break
        now.note(context.out, [kernel.id])
        result = check_kernel(kernel, spec, case, scheme, device, context.seed)
        records.append(check_record(result, kernel, writer.run_id, found))
        writer.write(records[-1])
        broken = already_broken(device)
        if broken:
            raise ContextBroken(f"{case.id} {scheme.name}: {broken}")
    clear_running(context.out)
    cut = len(records) < total
    wrong = _wrong(records)
    reason = "; ".join([*wrong.values()][:5] + ([f"time for {len(records)} of {total} checks"] if cut else []))
    figures = {
        "right": sum(record.status == "OK" for record in records),
        "wrong": sum(record.status not in ("OK", *NOT_RUN) for record in records),
        "not here": sum(record.status in NOT_RUN for record in records),
    }
    names = (writer.path.name,) if records else ()
    return Outcome("PARTIAL" if cut else "DONE", reason, figures=figures, files=names, excluded=wrong)


def _wrong(records: Sequence[Record], but: Sequence[Status] = ()) -> dict[str, str]:
    """Kernels with a failed check, and the failure; without failures whose status is in `but`."""
    return {
        f"{record.op}/{record.kernel}": f"{record.op}/{record.kernel} {record.case_id} {record.scheme}: "
        f"{record.status}: {record.reason}"
        for record in records
        if record.status not in ("OK", *NOT_RUN, *but)
    }


def bench(context: Context, op: str, suites: Sequence[str]) -> Outcome:
    """Every kernel of `op` on the cases of models, checked and timed against each other."""
    spec = registry.get_op(op)
    cases = [case for suite in suites for case in spec.cases.get(suite, ())]
    if context.dry_run:
        cases = list(spec.get_cases("smoke")[:1])
    records, run_id, cut = measure(context, op, usable(context, op), list(dict.fromkeys(cases)))
    timed = [record for record in records if record.latency_median_ms is not None and record.status == "OK"]
    figures = {"timed": len(timed), "not timed": len(records) - len(timed)}
    invalid = 0 if context.dry_run else sum(record.status == "INVALID" for record in records)
    done = f"time for {len({record.case_id for record in records})} of {len(cases)} cases"
    reason = "; ".join([*_wrong(records).values()][:5] + ([done] if cut else []))
    return Outcome(
        "PARTIAL" if cut else "DONE",
        reason,
        figures=figures | ({"invalid": invalid} if invalid else {}),
        files=(f"{run_id}.jsonl",),
        excluded=_wrong(records, NO_FAULT),
    )


def tune(context: Context, op: str) -> Outcome:
    """Searches configs of every tunable kernel of `op` in the available time; does not choose a config."""
    from rooflab.bench.tune.tune import tune_op

    here = {kernel.id: kernel for kernel in usable(context, op)}
    kernels = [kernel.name for kernel in here.values() if kernel.takes_config]
    if not kernels:
        return Outcome("UNSUPPORTED", f"no kernel of {op} that can run here takes a config")
    report = tune_op(
        op,
        kernels,
        cases=[registry.get_op(op).get_cases("smoke")[0].id] if context.dry_run else [],
        # The remaining 20% pays for a last measurement that takes longer than its share.
        budget_s=1.0 if context.dry_run else 0.8 * context.seconds,
        device=context.device,
        out=context.out,
        dry_run=context.dry_run,
        seed=context.seed,
        exclude=[kernel.id for kernel in registry.kernels(op).values() if kernel.id not in here],
    )
    figures = {f"{result.kernel} {result.bucket}": result.summary for result in report.results}
    return Outcome("DONE", report.stopped, figures=figures, files=report.files)


def flush(context: Context) -> Outcome:
    """Compares both ways of emptying the last-level cache."""
    from rooflab.bench.timing.flush_comparison import compare_flushes

    found = compare_flushes(context.device, budget_s=0.3 if context.dry_run else 6.0)
    write_whole(context.out / "flush.json", json.dumps(found, indent=1) + "\n")
    figures = {name: found[name] for name in ("cleaner", "read_error", "write_error")}
    return Outcome("DONE", figures=figures, files=("flush.json",))


def run_command(words: Sequence[str]) -> tuple[int, Any, str]:
    """Exit status, the JSON that the command printed (None if it printed none), and its standard error."""
    done = subprocess.run([sys.executable, "-m", "rooflab.bench", *words], capture_output=True, text=True)
    try:
        value = json.loads(done.stdout) if done.stdout.strip() else None
    except json.JSONDecodeError:
        value = {"output": done.stdout}
    return done.returncode, value, done.stderr.strip()


def command(
    context: Context, arguments: Sequence[str], dry_arguments: Sequence[str] = (), dry_reason: str = ""
) -> Outcome:
    """Runs a command of `rooflab` in this process; keeps its JSON as the entry's file and judges its exit status.

    `{out}` in an argument stands for the run's folder.  A dry run uses `dry_arguments` instead of `arguments`, or
    `dry_reason` says why no form of the command is short enough.
    """
    if context.dry_run and dry_reason:
        return Outcome("UNSUPPORTED", dry_reason)
    words = list(dry_arguments if context.dry_run else arguments)
    status, value, errors = run_command([word.replace("{out}", str(context.out)) for word in words])
    files = []
    if value is not None:
        files.append(f"{context.entry.replace(':', '-')}.json")
        write_whole(context.out / files[0], json.dumps(value, indent=1) + "\n")
    reason = " ".join(errors.split())[-500:] if status else ""
    failed = status not in ((0, 13) if context.dry_run else (0,))  # a dry run's times, NOISY or not, say nothing
    return Outcome("FAILED" if failed else "DONE", reason, figures={"exit status": status}, files=tuple(files))
