"""Compiles kernels of later entries while an earlier entry uses the GPU: `python -m rooflab.bench.suite.ahead PLAN`.

An entry is one command in the suite's plan.  Its kernels are compiled on half of the cores, into the compilers' caches
on disk.  Without a plan, the command compiles all kernels of the default plan and prints the time.  It needs no GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rooflab.bench import show
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.base.system_time import time
from rooflab.bench.compile.cases import has_code
from rooflab.bench.compile.compile_worker import CaseRefused, launches_of
from rooflab.bench.core import Failed, MachineLimits, Pool, default_scheme
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Entry
from rooflab.bench.suite.plan import make_plan, read_plan
from rooflab.kernels import registry
from rooflab.reference.spec import Case, Scheme, get_scheme
from rooflab.roofline.numbers import counted

MODULE = "rooflab.bench.suite.ahead"
LIMIT_S = 600.0
"""The most seconds for one entry; checking every kernel of attention takes a third of this time on one core."""
LOWEST_PRIORITY = 19
"""The lowest priority of a process: the process gets a core only when no other process wants it."""
compiled_hashes: set[str] = set()
"""The hashes of the kernels that this process compiled."""


def compilers() -> Pool:
    """Returns a pool of at most four processes that compile kernels on half of the CPU cores, beside a GPU command."""
    environment = {"TRITON_INTERPRET": None, "CUDA_VISIBLE_DEVICES": ""}
    return Pool(
        MODULE, environment=environment, limit_s=LIMIT_S, size=min(4, max(1, len(os.sched_getaffinity(0)) // 2))
    )


def compile_entries(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Compiles the kernels that these suite entries launch.  Returns a table row for each entry with kernels."""
    compile_requests = [{"entry": entry.id, "launches": list(entry.launches)} for entry in entries if entry.launches]
    compiler_pool = compilers()
    try:
        pool_answers = list(compiler_pool.ask_all(compile_requests))
    finally:
        compiler_pool.stop()
    rows = [row if isinstance(row, dict) else {"failed": str(row)} for row in pool_answers]
    return [{"entry": entry_request["entry"], **row} for entry_request, row in zip(compile_requests, rows, strict=True)]


def answer(request: Mapping[str, Any]) -> Any:
    """Answers a request: compiles the kernels of a suite entry.  Returns the number of new kernels and the seconds."""
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    start_s, num_before, num_microkernels, failures = time.monotonic(), len(compiled_hashes), 0, dict[str, str]()
    for launches in request["launches"]:
        if launches.get("microkernels"):
            num_microkernels += MachineLimits.compiled()
            continue
        for kernel, case, scheme in launched(launches):
            try:
                for kernel_launch in launches_of(kernel, case, scheme):
                    compiled_hashes.add(kernel_launch.source_hash)
            except CaseRefused:
                continue  # the kernel refuses this case
            except Failed.errors() as error:  # it fails in the entry too, which reports each case
                failures.setdefault(f"{kernel.id} {case.id} {scheme.name}", f"{type(error).__name__}: {error}"[:200])
    counts = {"kernels": len(compiled_hashes) - num_before + num_microkernels, "seconds": time.monotonic() - start_s}
    return counts | ({"failed": "; ".join(f"{name}: {fault}" for name, fault in failures.items())} if failures else {})


def launched(launches: Mapping[str, Any]) -> list[tuple[registry.Kernel, Case, Scheme]]:
    """Returns Rooflab's compiled kernels that a suite entry launches, each with a case and a scheme (dtypes)."""
    op = str(launches["op"])
    spec, kernel_names = registry.get_op(op), launches.get("kernels", ())
    kernels = [kernel for kernel in registry.kernels(op).values() if has_code(kernel)]
    named_cases = [spec.check_case(Case.parse(case_text)) for case_text in launches.get("cases", ())]
    cases = [*named_cases, *(case for suite in launches.get("suites", ()) for case in spec.cases.get(suite, ()))]
    scheme_name = launches.get("scheme", default_scheme(torch.device("cuda")))
    names = spec.schemes if scheme_name == "all" else [scheme_name if scheme_name in spec.schemes else spec.schemes[0]]
    chosen_kernels = [kernel for kernel in kernels if not kernel_names or kernel.name in kernel_names]
    return [(kernel, case, get_scheme(name)) for case in cases for name in names for kernel in chosen_kernels]


def main() -> None:
    """Compiles a plan's kernels and prints the time of each entry.  The exit status is 11 if a compilation fails."""
    start_s = time.monotonic()
    entries = make_plan()
    if sys.argv[1:]:
        path = Path(sys.argv[1])
        entries = read_plan(path)
        progress = state.load(path.parent, [entry.id for entry in entries])
        entries = [entry for entry in entries if not progress.done(entry.id)]  # a resumed run has done the others
    rows = compile_entries(entries)
    show.table(rows, ("entry", "kernels", "seconds", "failed"))
    core_s = sum(row.get("seconds", 0.0) for row in rows)
    num_failed = sum("failed" in row for row in rows)
    wall_seconds = time.monotonic() - start_s
    show.line(f"{core_s:.0f} s of a core, in {wall_seconds:.0f} s; {num_failed} of {counted(len(rows), 'row')} failed")
    if num_failed:
        raise SystemExit(ExitStatus.INCORRECT)


if __name__ == "__main__":
    main()
