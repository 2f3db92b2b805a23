"""What the wrong checks of a kernel have in common, and none of its right ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from rooflab.bench.core.check import CheckResult
from rooflab.bench.core.record import NOT_RUN
from rooflab.reference.spec import Case

LOOKS = 3
"""Most pairs of a wrong and a right case that are tried, until one can be checked with values of the other."""
Facts = Mapping[str, Any]

Again = Callable[[CheckResult, Case, str], str]
"""The status of a result's kernel on another case, in a scheme; empty if that cannot be checked."""


def in_common(results: Sequence[CheckResult], again: Again) -> str:
    """A sentence with what is true of all wrong checks of one kernel, and of none of its right ones, and with the run
    in which all wrong ones failed; empty if nothing is.  With one wrong or one right check almost everything would
    be, and by chance much is: it is said if a wrong case with a right one's value is right, and the other way round.  A
    case of nothing, which any kernel does right, says nothing."""
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
    """Whether the values of these names, moved from a right case to a wrong one and back, move the fault."""
    for bad, good in zip(wrong[:LOOKS], right[:LOOKS], strict=False):
        statuses = []
        for one, other in ((bad, good), (good, bad)):
            case = one.case.but(**{name: other.case[name] for name in names if name in other.case})
            statuses.append(again(one, case, other.scheme if "scheme" in names else one.scheme))
        if "" not in statuses:
            return statuses[0] == "OK" and statuses[1] not in ("OK", *NOT_RUN)
    return False


def _equal_or_not(pair: Sequence[str], wrong: Sequence[Facts], right: Sequence[Facts]) -> str:
    """Whether two sizes are equal in each wrong case and in no right one, or the other way round."""
    equal = [{facts.get(pair[0]) == facts.get(pair[1]) for facts in side} for side in (wrong, right)]
    sign = "=" if equal == [{True}, {False}] else "!=" if equal == [{False}, {True}] else ""
    return f"{pair[0]} {sign} {pair[1]}" if sign else ""


def _apart(name: str, wrong: set[Any], right: set[Any]) -> str:
    """A text that is true of each value in `wrong` and of none in `right`; empty without one."""
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
