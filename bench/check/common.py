"""What the wrong checks of a kernel have in common, and none of its right ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rooflab.bench.check.check import CheckResult
from rooflab.bench.records.record import NOT_RUN
from rooflab.reference.spec import Case


def in_common(results: Sequence[CheckResult]) -> str:
    """A sentence with what is true of all wrong checks of one kernel, and of none of its right ones, and with the run
    in which all wrong ones failed; empty if nothing is.  With one wrong or one right check almost everything would
    be."""
    right = [{**result.case, "scheme": result.scheme} for result in results if result.status == "OK"]
    failed = [result for result in results if result.status not in ("OK", *NOT_RUN)]
    wrong = [{**result.case, "scheme": result.scheme} for result in failed]
    names = wrong[0] if min(len(right), len(wrong)) > 1 else ()
    found = [_apart(name, *({facts.get(name) for facts in side} for side in (wrong, right))) for name in names]
    said = ", ".join(filter(None, found))
    runs = {re.sub(r"\d+", "N", result.labels[-1]) for result in failed if result.labels}
    run = runs.pop() if names and len(runs) == 1 else "first data"
    same = "" if run == "first data" else f"all {len(wrong)} wrong checks fail on {run}"
    told = f"all {len(wrong)} wrong checks have {said}; none of the {len(right)} right ones has" if said else ""
    return "; ".join(filter(None, (told, same)))


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
            return next((f"{name} % {step} != 0" for step in apart), "")
    return " or ".join(sorted(Case(**{name: value}).id for value in wrong))
