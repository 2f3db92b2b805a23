"""Makes the checks that a command asks for, sums them up, says what all wrong checks share and what to run again."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.checks.drawn import HOW, drawn_points, most_work, own_numbers, smallest, turns_of
from rooflab.bench.core import NOT_RUN, Checkers, CheckResult, CheckTask, Environment, RunWriter, source_of
from rooflab.kernels import registry
from rooflab.kernels._folders import check_caches
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
    """Makes checks, and calls `done` with each result as it comes.

    With a limit, the kernels take turns, and results are left out as `Checkers.each` says; the time counts from when
    the processes have started.  Otherwise interpreted kernels come first, because they take longest.  Gives a record of
    each check to `writer` at once.  Returns the results in the order of `checks`, and puts each at once `into` its
    place.
    """
    check_caches()
    environment = Environment.now(check.device.index or 0)
    ranks = (
        [item.kernel.backend in registry.CPU_BACKENDS for item in checks] if limit_s == math.inf else turns_of(checks)
    )
    order = sorted(range(len(checks)), key=ranks.__getitem__)
    results = {} if into is None else into
    check.start(checks)
    for index, found in check.each([checks[place] for place in order], limit_s):
        results[order[index]] = found
        if writer:
            writer.write(found.record(checks[order[index]].kernel, writer.run_id, environment))
        done(found)
    return [results[place] for place in sorted(results)]


Again = Callable[[CheckResult, Case, str], str]
"""The status of a result's kernel on another case, in a scheme; empty if this case cannot be checked."""


def looking_again(check: Checkers, limit_s: float) -> Again:
    """Checks of kernels on other cases, within `limit_s` seconds in all, from now on."""
    ends = time.monotonic() + limit_s

    def again(known: CheckResult, case: Case, scheme: str) -> str:
        spec, kernel = registry.get_op(known.op), registry.get_kernel(known.op, known.kernel)
        item = CheckTask(kernel, case, get_scheme(scheme), known.seed, known.beyond)
        try:
            spec.make_inputs(spec.check_case(case), item.scheme, torch.device("meta"), 0)
        except ValueError:
            return ""
        return next((found.status for _, found in check.each([item], ends - time.monotonic())), "")

    return again


def smallest_failures(failures: Sequence[CheckResult], device: torch.device, again: Again) -> Iterator[str]:
    """For each failure, the command that shows it; drawn cases are made as small as possible while they still fail."""
    for failed in failures:
        spec, kernel = registry.get_op(failed.op), registry.get_kernel(failed.op, failed.kernel)
        most, case = most_work(kernel, device), failed.case

        def fails(smaller: Case, failed: CheckResult = failed) -> bool:
            return again(failed, smaller, failed.scheme) == failed.status

        for point in drawn_points(spec, failed.seed, most, own_numbers(source_of(kernel))):
            if point.case == failed.case and HOW in point.values:
                case = smallest(spec, point, most, fails)
        named = f"--kernel {kernel.file or failed.kernel} --case {case.id} --scheme {failed.scheme}"
        yield f"rooflab check {failed.op} {named} --seed {failed.seed}"


def size_of(result: CheckResult) -> int:
    """The bytes of the inputs of a check."""
    asked = result.case, get_scheme(result.scheme), torch.device("meta"), result.seed
    inputs = registry.get_op(result.op).make_inputs(*asked).values()
    return nbytes(*(value for value in inputs if isinstance(value, torch.Tensor)))


def check_rows(results: Iterable[CheckResult]) -> list[dict[str, Any]]:
    """Returns one row per check."""
    names = ("scheme", "seed", "status", "checked_by", "discriminating", "weak", "reason")
    return [
        {"op": result.op, "kernel": result.kernel, "case": result.case.id}
        | {"error_over_tolerance": max((error.max_error_over_tolerance for error in result.errors), default=None)}
        | {name: getattr(result, name) for name in names}
        for result in results
    ]


def summarize_checks(results: Sequence[CheckResult], asked: Sequence[CheckTask] = ()) -> list[dict[str, Any]]:
    """Returns one row per kernel: the numbers of right and wrong cases, and the worst error of all cases.  Kernels of
    `asked` without a result have a row too: `unknown` if checks were left out and no result says what is right."""
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


LOOKS = 3
"""The most pairs of a wrong and a right case that are tried, until one case can be checked with values of the other."""
Facts = Mapping[str, Any]


def in_common(results: Sequence[CheckResult], again: Again) -> str:
    """A sentence with a fact that all wrong checks of a kernel share and none of its right checks has, and the run in
    which all wrong checks failed; empty without such a fact.  With one wrong or one right check almost any fact would
    do, and many do by chance: so a fact is named only if a wrong case with a right case's value is right, and the
    other way round.  A case without elements does not count, because any kernel is right on it."""
    passed = [
        result for result in results if result.status == "OK" and all(v for k, v in result.case.items() if k.isupper())
    ]
    right = [{**result.case, "scheme": result.scheme} for result in passed]
    failed = [result for result in results if result.status not in ("OK", *NOT_RUN)]
    wrong = [{**result.case, "scheme": result.scheme} for result in failed]
    names = list(wrong[0]) if min(len(right), len(wrong)) > 1 else []
    found: list[tuple[tuple[str, ...], str]] = [
        ((name,), _apart(name, *({facts.get(name) for facts in side} for side in (wrong, right)))) for name in names
    ]
    found += [(pair, _equal_or_not(pair, wrong, right)) for pair in combinations(filter(str.isupper, names), 2)]
    said = ", ".join(text for own, text in found if text and _holds(own, failed, passed, again))
    runs = {re.sub(r"\d+\b(?!-bit)", "N", result.labels[-1]) for result in failed if result.labels}
    run = runs.pop() if names and len(runs) == 1 else "first data"
    same = "" if run == "first data" else f"all {len(wrong)} wrong checks fail on {run}"
    told = f"all {len(wrong)} wrong checks have {said}; none of the {len(right)} right ones has" if said else ""
    return "; ".join(filter(None, (told, same)))


def _holds(names: Sequence[str], wrong: Sequence[CheckResult], right: Sequence[CheckResult], again: Again) -> bool:
    """Whether the fault moves with the values of these names, from a wrong case to a right case and back."""
    for bad, good in zip(wrong[:LOOKS], right[:LOOKS], strict=False):
        statuses = []
        for one, other in ((bad, good), (good, bad)):
            case = one.case.but(**{name: other.case[name] for name in names if name in other.case})
            statuses.append(again(one, case, other.scheme if "scheme" in names else one.scheme))
        if "" not in statuses:
            return statuses[0] == "OK" and statuses[1] not in ("OK", *NOT_RUN)
    return False


def _equal_or_not(pair: Sequence[str], wrong: Sequence[Facts], right: Sequence[Facts]) -> str:
    """Whether two sizes are equal in each wrong case and in no right case, or the other way round."""
    equal = [{facts.get(pair[0]) == facts.get(pair[1]) for facts in side} for side in (wrong, right)]
    sign = "=" if equal == [{True}, {False}] else "!=" if equal == [{False}, {True}] else ""
    return f"{pair[0]} {sign} {pair[1]}" if sign else ""


def _apart(name: str, wrong: set[Any], right: set[Any]) -> str:
    """A text that is true of each value in `wrong` and of none in `right`; empty without such a text."""
    if wrong & right or None in wrong:
        return ""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in wrong | right):
        if min(wrong) > max(right):
            return f"{name} > {max(right)}"
        if max(wrong) < min(right):
            return f"{name} < {min(right)}"
        if len(wrong) > 1:
            steps = (2**power for power in range(1, 9))
            apart = (step for step in steps if not any(v % step for v in right) and all(v % step for v in wrong))
            power = [{bool(int(v) & int(v) - 1) for v in side} for side in (wrong, right)]
            other = f"{name} that is no power of 2" if power == [{True}, {False}] else ""
            return other or next((f"{name} % {step} != 0" for step in apart), "")
    return " or ".join(sorted(Case(**{name: value}).id for value in wrong))
