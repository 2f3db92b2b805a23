"""The checks that a command asks for: which, in which order, in how many processes, and what to run again."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from typing import Any, cast

import torch

from rooflab.bench.core.call import input_bytes
from rooflab.bench.core.check import check_record
from rooflab.bench.core.check_data import CheckResult
from rooflab.bench.core.environment import snapshot
from rooflab.bench.core.inputs import (
    EMPTY,
    HOW,
    IN_SOFTWARE,
    ON_HARDWARE,
    PRINCIPLES,
    TILES,
    Most,
    Planted,
    drawn_points,
    most_different,
    of_several_tiles,
    own_numbers,
    principles_first,
    shown_by,
    smallest,
    taken,
)
from rooflab.bench.core.outside import Checkers, CheckTask, in_turn
from rooflab.bench.core.process import cores
from rooflab.bench.core.record import NOT_RUN
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.core.select import Selection, file_of, source_of
from rooflab.bench.core.system_time import time
from rooflab.bench.core.why import Again
from rooflab.kernels import registry
from rooflab.kernels._folders import check_caches
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme


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
    of the op's own cases with all planted inputs. The first check of each principle comes before the others.
    """
    found = []
    for op, kernels in chosen.kernels.items():
        spec = registry.get_op(op)
        schemes = chosen.schemes_of(spec)
        for kernel in kernels if schemes else ():
            most = _most(kernel, chosen.device)
            drawn = drawn_points(spec, chosen.seed, most, own_numbers(source_of(kernel)))
            often, own = every or most == ON_HARDWARE, list[CheckTask]()
            for case, scheme in product(spec.cases["smoke"], schemes):
                whole = often or case == spec.cases["smoke"][0] or scheme == schemes[-1]
                own.append(CheckTask(kernel, case, scheme, chosen.seed, whole))
            if tiled := of_several_tiles(spec):
                own.append(CheckTask(kernel, tiled, schemes[-1], chosen.seed, "planted alone", TILES))
            for turn, (edge, point) in enumerate(zip_longest(most_different(spec.cases_in("edge")), drawn)):
                scheme = schemes[turn % len(schemes)]
                for each in (schemes if every else (scheme,)) if edge is not None else ():
                    own.append(CheckTask(kernel, edge, each, chosen.seed, often, _is_empty(spec, edge, each)))
                if point is not None:
                    how = cast(Planted, point.values.get(HOW, often))
                    own.append(CheckTask(kernel, point.case, scheme, chosen.seed, how, point.principle))
            found += principles_first(_offered(own, spec, schemes), lambda item: item.principle)
    return found


def _offered(asked: Sequence[CheckTask], spec: OpSpec, schemes: Sequence[Scheme]) -> list[CheckTask]:
    """The checks of one kernel that it takes: without options that it refuses, or in another scheme; and the first one
    of each kind that it refuses, which says so."""
    refusals, made = dict[str, CheckTask](), dict[tuple[Case, Scheme, Planted], CheckTask]()
    for item in asked:
        own = (item.scheme, *(scheme for scheme in schemes if scheme != item.scheme))
        found = taken(item.kernel, spec, item.case, own)
        if found != (item.case, item.scheme):
            inputs = spec.make_inputs(item.case, item.scheme, torch.device("meta"), item.seed)
            refusals.setdefault(re.sub(r"\d+", "N", str(item.kernel.why_not_args(inputs, spec))), item)
        if found is not None:
            fit = item._replace(case=found[0], scheme=found[1], schemes=own)
            made.setdefault((*found, item.planted), fit)
    takes = [*made.values()]
    return [*takes[:1], *refusals.values(), *takes[1:]]


def _is_empty(spec: OpSpec, case: Case, scheme: Scheme) -> str:
    """The principle of a case with a tensor of no elements; empty for any other case."""
    inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0).values()
    return EMPTY if any(isinstance(value, torch.Tensor) and not value.numel() for value in inputs) else ""


def _most(kernel: Kernel, device: torch.device) -> Most:
    return IN_SOFTWARE if device.type == "cpu" and kernel.has_code else ON_HARDWARE


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
    check_caches()
    environment = snapshot(device.index or 0)
    ranks = (
        [item.kernel.backend in registry.CPU_BACKENDS for item in checks] if limit_s == math.inf else turns_of(checks)
    )
    order = sorted(range(len(checks)), key=ranks.__getitem__)
    results = {} if into is None else into
    workers = cores() if device.type == "cpu" else 1
    check = Checkers(device, emulate)
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


def looking_again(device: torch.device, emulate: bool, limit_s: float) -> Again:
    """Checks of kernels on other cases, within `limit_s` seconds in all, from now on."""
    check, ends = Checkers(device, emulate), time.monotonic() + limit_s

    def again(known: CheckResult, case: Case, scheme: str) -> str:
        spec, kernel = registry.get_op(known.op), registry.get_kernel(known.op, known.kernel)
        item = CheckTask(kernel, case, get_scheme(scheme), known.seed, known.beyond)
        try:
            spec.make_inputs(spec.check_case(case), item.scheme, torch.device("meta"), 0)
        except ValueError:
            return ""
        return next((found.status for _, found in in_turn([item], check, 1, ends - time.monotonic())), "")

    return again


def smallest_failures(failures: Sequence[CheckResult], device: torch.device, again: Again) -> Iterator[str]:
    """For each failure the command that shows it; drawn cases are made as small as they still fail."""
    for failed in failures:
        spec, kernel = registry.get_op(failed.op), registry.get_kernel(failed.op, failed.kernel)
        most, case = _most(kernel, device), failed.case

        def fails(smaller: Case, failed: CheckResult = failed) -> bool:
            return again(failed, smaller, failed.scheme) == failed.status

        for point in drawn_points(spec, failed.seed, most, own_numbers(source_of(kernel))):
            if point.case == failed.case and HOW in point.values:
                case = smallest(spec, point, most, fails)
        named = f"--kernel {file_of(kernel) or failed.kernel} --case {case.id} --scheme {failed.scheme}"
        yield f"rooflab check {failed.op} {named} --seed {failed.seed}"


def size_of(result: CheckResult) -> int:
    """Bytes of the inputs of a check."""
    asked = result.case, get_scheme(result.scheme), torch.device("meta"), result.seed
    return input_bytes(registry.get_op(result.op).make_inputs(*asked))


def principles_tried(checks: Sequence[CheckTask], made: Mapping[int, CheckResult]) -> str:
    """A line: which of the principles the checks that ran have tried, and which they have not, or, of a whole plan
    without a fault, which have no case for these kernels."""
    ran = {place: result for place, result in made.items() if result.status not in NOT_RUN}
    tried = {checks[place].principle for place in ran} | shown_by(label for one in ran.values() for label in one.labels)
    named = [", ".join(one for one in PRINCIPLES if (one in tried) == side) or "none" for side in (True, False)]
    whole = len(made) == len(checks) and all(result.status == "OK" for result in ran.values())  # a fault ends a check
    left = "without a case here" if whole else "not tried"
    return f"principles tried: {named[0]}; {left}: {named[1]}"


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
