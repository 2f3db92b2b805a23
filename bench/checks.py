"""The checks that a command asks for: which, in which order, in how many processes, and what to run again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product, zip_longest
from typing import Any, cast

import torch

from rooflab.bench.calls.clock import time
from rooflab.bench.calls.selection import Selection, file_of
from rooflab.bench.check.check import CheckResult, check_record
from rooflab.bench.check.drawn import HOW, IN_SOFTWARE, ON_HARDWARE, Most, drawn_points, most_different, smallest
from rooflab.bench.check.runs import Planted
from rooflab.bench.check.spread import Checkers, CheckTask, in_turn
from rooflab.bench.compile.cases import has_code
from rooflab.bench.emulate.checks import emulators
from rooflab.bench.processes.child import cores
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import NOT_RUN
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, get_scheme


def listed_checks(chosen: Selection) -> list[CheckTask]:
    """Every kernel of a selection on every case of it, in every scheme."""
    return [
        CheckTask(kernel, case, scheme, chosen.seed)
        for op, kernels in chosen.kernels.items()
        for case in chosen.cases_of(registry.get_op(op))
        for scheme in chosen.schemes_of(registry.get_op(op))
        for kernel in kernels
    ]


def drawn_checks(chosen: Selection, every: bool = False) -> list[CheckTask]:
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
                found.append(CheckTask(kernel, case, scheme, chosen.seed, whole))
            for turn, (edge, point) in enumerate(zip_longest(most_different(spec.cases_in("edge")), drawn[most])):
                scheme = schemes[turn % len(schemes)]
                for each in (schemes if every else (scheme,)) if edge is not None else ():
                    found.append(CheckTask(kernel, edge, each, chosen.seed, planted=often))
                if point is not None:
                    found.append(CheckTask(kernel, point.case, scheme, chosen.seed, cast(Planted, point.values[HOW])))
    return found


def _most(kernel: Kernel, device: torch.device) -> Most:
    return IN_SOFTWARE if device.type == "cpu" and has_code(kernel) else ON_HARDWARE


def run_checks(
    checks: Sequence[CheckTask],
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


def turns_of(checks: Sequence[CheckTask]) -> list[int]:
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
        CheckTask(
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

        def fails(item: CheckTask, status: str, case: Case) -> bool:
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


def summarize_checks(results: Sequence[CheckResult], asked: Sequence[CheckTask] = ()) -> list[dict[str, Any]]:
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
