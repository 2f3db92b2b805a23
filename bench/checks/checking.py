"""Runs the checks of a command, summarizes the results, and gives the commands that reproduce failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.checks.drawn import WAY_AXIS, drawn_points, most_work, own_numbers, smallest, turns_of
from rooflab.bench.core import NOT_RUN, Checkers, CheckResult, CheckTask, Environment, RunWriter, source_of
from rooflab.kernels import registry
from rooflab.kernels._folders import check_caches
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, get_scheme, nbytes


def run_checks(
    checks: Sequence[CheckTask],
    check: Checkers,
    writer: RunWriter | None,
    done: Callable[[CheckResult], None],
    *,
    limit_s: float = math.inf,
    into: dict[int, CheckResult] | None = None,
) -> list[CheckResult]:
    """Runs the checks and returns the results, in the order of `checks`.

    Each result is at once passed to `done`, written by `writer` as a record, and stored in `into` by the check's index.
    `limit_s` is a time limit in seconds.  With a limit, the kernels take turns, and late checks have no result.
    Without a limit, interpreted kernels come first, because they take longest."""
    check_caches()
    environment = Environment.now(check.device.index or 0)
    check_ranks = (
        [item.kernel.backend in registry.CPU_BACKENDS for item in checks] if limit_s == math.inf else turns_of(checks)
    )
    check_order = sorted(range(len(checks)), key=check_ranks.__getitem__)
    result_by_index = {} if into is None else into
    check.start(checks)
    for order_index, result in check.each([checks[check_index] for check_index in check_order], limit_s):
        result_by_index[check_order[order_index]] = result
        if writer:
            writer.write(result.record(checks[check_order[order_index]].kernel, writer.run_id, environment))
        done(result)
    return [result_by_index[check_index] for check_index in sorted(result_by_index)]


def smallest_failures(failures: Sequence[CheckResult], check: Checkers, limit_s: float) -> Iterator[str]:
    """Yields a command that reproduces each failure.  A drawn case is first reduced to a smaller case that fails.  The
    reduction takes at most `limit_s` seconds for all failures."""
    deadline_s = time.monotonic() + limit_s
    for failed in failures:
        spec, kernel = registry.get_op(failed.op), registry.get_kernel(failed.op, failed.kernel)
        case_limits, case = most_work(kernel, check.device), failed.case

        def fails(smaller: Case, failed: CheckResult = failed, kernel: Kernel = kernel) -> bool:
            task = CheckTask(kernel, smaller, get_scheme(failed.scheme), failed.seed, failed.beyond)
            return any(row.status == failed.status for _, row in check.each([task], deadline_s - time.monotonic()))

        for domain_point in drawn_points(spec, failed.seed, case_limits, own_numbers(source_of(kernel))):
            if domain_point.case == failed.case and WAY_AXIS in domain_point.values:
                case = smallest(spec, domain_point, case_limits, fails)
        command_options = f"--kernel {kernel.file or failed.kernel} --case {case.id} --scheme {failed.scheme}"
        yield f"rooflab check {failed.op} {command_options} --seed {failed.seed}"


def size_of(result: CheckResult) -> int:
    """Returns the size in bytes of the inputs of a check."""
    input_args = result.case, get_scheme(result.scheme), torch.device("meta"), result.seed
    inputs = registry.get_op(result.op).make_inputs(*input_args).values()
    return nbytes(*(input_value for input_value in inputs if isinstance(input_value, torch.Tensor)))


def check_rows(results: Iterable[CheckResult]) -> list[dict[str, Any]]:
    """Returns one table row for each check, with its kernel, case, error and status."""
    column_names = ("scheme", "seed", "status", "checked_by", "discriminating", "weak", "reason")
    return [
        {"op": result.op, "kernel": result.kernel, "case": result.case.id}
        | {"error_over_tolerance": max((error.max_error_over_tolerance for error in result.errors), default=None)}
        | {name: getattr(result, name) for name in column_names}
        for result in results
    ]


def summarize_checks(results: Sequence[CheckResult], asked: Sequence[CheckTask] = ()) -> list[dict[str, Any]]:
    """Returns one row per kernel: the number of right cases, the number of wrong cases, and the worst error.

    `asked` holds the requested checks, and each of their kernels has a row.  The field `unknown` is True if no run can
    judge the kernel.  Then some checks have no result, and the kernel refused the cases of all results."""
    summary_rows = []
    check_counts = Counter((check_task.kernel.op, check_task.kernel.name) for check_task in asked)
    for op, name in dict.fromkeys([*check_counts, *((result.op, result.kernel) for result in results)]):
        kernel_results = [result for result in results if (result.op, result.kernel) == (op, name)]
        run_results = [result for result in kernel_results if result.status not in NOT_RUN]
        error_ratios = [error.max_error_over_tolerance for result in run_results for error in result.errors]
        skip_reasons = [result.reason for result in kernel_results if result.status in NOT_RUN]
        summary_rows.append(
            {
                "op": op,
                "kernel": name,
                "role": registry.get_kernel(op, name).role,
                "ok": sum(result.status == "OK" for result in run_results),
                "failed": sum(result.status != "OK" for result in run_results),
                "not run": len(skip_reasons),
                "left out": (num_unreported := max(0, check_counts[op, name] - len(kernel_results))),
                "unknown": bool(num_unreported) and all(result.not_offered for result in kernel_results),
                "checked_by": " ".join(dict.fromkeys(result.checked_by for result in run_results)) or "none",
                "worst": max(error_ratios, default=None),
                "weak": sum(not result.discriminating for result in run_results),
                "reason": "; ".join(dict.fromkeys(skip_reasons)),
            }
        )
    return summary_rows
