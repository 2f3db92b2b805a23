"""Runs each kernel's first check on a GPU in its own process: `python -m rooflab.bench.suite.first gemm rmsnorm`.

A kernel with a wrong barrier hangs, and an illegal access breaks the CUDA context.  The process limits both faults to
one kernel.  Kernels that only call torch are not checked, nor is code that passed before on this kind of GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch

from rooflab.bench.core import NOT_RUN, Checkers, CheckResult, CheckTask, Environment, RunWriter, default_scheme
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.bench.suite.passed import CODE_FIELD, Passed, first_taken
from rooflab.bench.suite.step import context_of, end, parser
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

FIRST_CHECK_S = 60.0
"""The seconds after which a first check counts as hung.  It compiles one kernel and runs it on one small case."""
MAX_PARALLEL_CHECKS = 12
"""The most first checks at the same time.  Each holds a CUDA context of half a GB; no check is timed."""
RISKY_BACKENDS = ("triton", "cuda", "gluon")
"""The backends, in the order of first checks: a kernel that hangs takes the card's time from the kernels beside it, and
kernels with barriers may hang."""


def first_checks(context: Context, ops: Sequence[str], trust: Path | None = None) -> EntryOutcome:
    """Runs each kernel on one small case that it supports, in its own process with a time limit.

    `trust` is a folder with records of an earlier run.  A check in them is not repeated for the same code and GPU name.
    A kernel is excluded from later entries if its check fails, crashes or gets no time."""
    device, machine = torch.device(context.device), Environment.now()
    passed_kernels_store, writer = Passed(machine), RunWriter(context.out)
    kernels = [kernel for op in ops for kernel in registry.kernels(op).values()]
    risky_kernels = sorted(
        (k for k in kernels if k.backend not in registry.CPU_BACKENDS), key=lambda k: RISKY_BACKENDS.index(k.backend)
    )
    if context.dry_run:
        risky_kernels = risky_kernels[:1]  # each process takes seconds, and all kernels take the same path
    elif trust is not None:
        passed_kernels_store.trust(trust)
    passed_kernels = [kernel for kernel in risky_kernels if not context.dry_run and passed_kernels_store.holds(kernel)]
    runnable_kernels = [kernel for kernel in risky_kernels if context.dry_run or kernel.why_not_here(device) is None]
    checklist = [kernel for kernel in runnable_kernels if kernel not in passed_kernels]
    check_tasks = [(kernel, chosen) for kernel in checklist if (chosen := first_taken(kernel, default_scheme(device)))]

    checkers = Checkers(device, limit_s=FIRST_CHECK_S)

    def attempt(kernel: Kernel, chosen: tuple[Case, Scheme]) -> CheckResult | None:
        return None if context.left_s < 0 else checkers(CheckTask(kernel, *chosen))

    excluded_kernels: dict[str, str] = {}
    ok_kernels: list[Kernel] = []
    skipped_ids: list[str] = []
    with ThreadPoolExecutor(min(MAX_PARALLEL_CHECKS, max(1, 3 * (psutil.cpu_count() or 2) // 4))) as thread_pool:
        kernel_by_future = {thread_pool.submit(attempt, *check_task): check_task[0] for check_task in check_tasks}
        for check_future in as_completed(kernel_by_future):
            kernel, check_error = kernel_by_future[check_future], check_future.exception()
            if check_error is not None:  # any error: it must not end the checks of the other kernels
                excluded_kernels[kernel.id] = f"{type(check_error).__name__}: {check_error}"
            elif (check_result := check_future.result()) is None:
                skipped_ids.append(kernel.id)
            else:
                record = check_result.record(kernel, writer.run_id, machine)
                code_hash_field = {CODE_FIELD: passed_kernels_store.code(kernel)}
                writer.write(replace(record, environment={**record.environment, **code_hash_field}))
                if check_result.status == "OK":
                    ok_kernels.append(kernel)
                elif check_result.status not in NOT_RUN:
                    excluded_kernels[kernel.id] = f"{check_result.status}: {check_result.reason}"
    if not context.dry_run:
        passed_kernels_store.keep({kernel.id: passed_kernels_store.code(kernel) for kernel in ok_kernels})
    fault_lines = [f"{name}: {fault_text}" for name, fault_text in excluded_kernels.items()]
    right, num_passed_before = len(ok_kernels), len(passed_kernels)
    figures = {"right": right + num_passed_before, "right before": num_passed_before, "excluded": len(excluded_kernels)}
    figures["not here"] = len(risky_kernels) - right - num_passed_before - len(excluded_kernels) - len(skipped_ids)
    excluded_kernels |= dict.fromkeys(skipped_ids, "no time was left for its first check")
    fault_reason = "; ".join(fault_lines + [f"no time for {name}" for name in skipped_ids])
    return EntryOutcome("PARTIAL" if skipped_ids else "DONE", fault_reason, figures=figures, excluded=excluded_kernels)


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument("ops", nargs="*", help="without one, all")
    options.add_argument("--trust", type=Path, help="records of an earlier run")
    arguments = options.parse_args()
    end(context_of(arguments), partial(first_checks, ops=arguments.ops or list(registry.ops()), trust=arguments.trust))
