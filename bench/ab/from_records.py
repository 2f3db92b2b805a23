"""Two record files (or folders) as the sides of an A/B: what is missing, wrong or of another machine never passes.

A record is one process' reading.  Records of the two sides that alternate in time are pairs; those of one side made
after all of the other's are not, and then an effect is shown and nothing is called, because the machine may have
drifted.  Records of an A/B know which of them confirm; of others the first half calls, and the second half confirms.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rooflab.bench.ab import floors
from rooflab.bench.ab.pairs import Reading, fault_of
from rooflab.bench.ab.run import NOT_RUN, difference, several_methods
from rooflab.bench.ab.to_records import CONFIRMS
from rooflab.bench.ab.verdict import (
    BOUNDED_PAIRS,
    EXIT_ORDER,
    EXIT_STATUS,
    Evidence,
    Outcome,
    Rules,
    judge,
    wants_confirmation,
)
from rooflab.bench.records.files import read
from rooflab.bench.records.methods import paired_method_of
from rooflab.bench.records.record import Record, Verdict

NO_MACHINE = ("unknown", "imported-unknown-")
"""How the key of a machine begins that nobody knows."""
APART = "the sides were not measured in turn, so that a drift of the machine may be all that they show"


def compare_files(a: Path, b: Path, rules: Rules, kernels: Sequence[str] = ()) -> list[Outcome]:
    """The outcomes of every kernel, case and scheme that side A has been measured on.

    With two `kernels`, side A is the first of them and side B the second.  Raises `ValueError` on a file that cannot be
    read: truncated, of a newer schema, or not there; and on sides that are not two: with a run in common, or of several
    commits.
    """
    if len(kernels) not in (0, 2):
        raise ValueError(f"kernel: expected two or none beside records, got {len(kernels)}")
    named = kernels or (None, None)
    sides = [_by_key(read(path), kernel) for path, kernel in zip((a, b), named, strict=True)]
    labels = (str(a), str(b))
    evidence = []
    for key in sides[0]:
        _check_apart(key, sides[0][key], sides[1].get(key, []), labels)
        found = _evidence(key, sides[0][key], sides[1].get(key, []), labels, rules)
        if found is not None:
            evidence.append(found)
    return judge(evidence, rules)


def only_in(a: Path, b: Path) -> list[str]:
    """What B has and A has not: new, with nothing to be compared with."""
    known = _by_key(read(a))
    return [key for key in _by_key(read(b)) if key not in known]


def _by_key(records: Sequence[Record], kernel: str | None = None) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.timestamp):
        if record.kind == "bench" and record.op and kernel in (None, record.kernel):
            name = record.op if kernel else f"{record.op}/{record.kernel}"
            key = f"{name} {record.case_id} {record.scheme}"
            found.setdefault(key, []).append(record)
    return found


def _check_apart(key: str, first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str]) -> None:
    """Raises `ValueError` where a run is on both sides, or a side is of several commits."""
    runs = [{(record.run_id, record.kernel) for record in records} for records in (first, second)]
    common = sorted(run for run, _ in runs[0] & runs[1])
    if common:
        raise ValueError(f"records: expected two sides, got the run {common[0]} of {key} on both")
    for records, label in ((first, labels[0]), (second, labels[1])):
        found = {(str(record.commit)[:10], record.dirty) for record in records}
        if len(found) > 1:
            names = sorted(f"{commit} and changes" if dirty else commit for commit, dirty in found)
            raise ValueError(f"records: expected one commit in {label}, got {', '.join(names)} of {key}")


def _evidence(
    key: str, first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str], rules: Rules
) -> Evidence | None:
    if not second:
        return Evidence(key, broken=("MISSING", f"{labels[0]} has it, {labels[1]} has not: removed or renamed"))
    if all(record.status in NOT_RUN for record in (*first, *second)):
        return None  # it can run on neither side
    faults = [
        fault
        for records, label in ((first, labels[0]), (second, labels[1]))
        for record in records
        if (fault := _fault(record, label)) is not None
    ]
    # The worst: where one side broke, nothing was measured on the other.
    broken = min(faults, key=lambda fault: EXIT_ORDER.index(EXIT_STATUS[fault[0]]), default=None)
    broken = broken or _differ(first, second)
    if broken is not None:
        return Evidence(key, broken=broken)
    a, b = _runs(first), _runs(second)
    pairs, again = _batches(a, b, rules)
    count = len(pairs) + len(again)
    few = f"{count} runs of each side; at least {2 * BOUNDED_PAIRS} are needed, half of them to confirm"
    return Evidence(
        key=key,
        first=pairs,
        second=again,
        drifting="" if _in_turn([run.timestamp for run in a], [run.timestamp for run in b]) else APART,
        noise_floor=_floor(first[0], second[0]),
        identical=_identical([*first, *second]),
        unconfirmed=few if count < 2 * BOUNDED_PAIRS else "",
    )


class _Run(NamedTuple):
    """One process of a side."""

    timestamp: str
    seconds: float
    """Median over its records."""
    confirms: float | None
    """Of an A/B: whether its pair is of the second batch."""


_Pairs = tuple[tuple[float, float], ...]


def _batches(a: Sequence[_Run], b: Sequence[_Run], rules: Rules) -> tuple[_Pairs, _Pairs]:
    """The pairs that call and those that confirm; all call where half of them do not."""
    if all(run.confirms is not None for run in (*a, *b)):
        first, second = (
            _paired(*([run for run in side if run.confirms == confirms] for side in (a, b))) for confirms in (0, 1)
        )
        return first, second
    pairs = _paired(a, b)
    half = (len(pairs) + 1) // 2
    if wants_confirmation(Evidence("", first=pairs[:half]), rules):
        return pairs[:half], pairs[half:]
    return pairs, ()


def _paired(a: Sequence[_Run], b: Sequence[_Run]) -> _Pairs:
    return tuple((one.seconds, other.seconds) for one, other in zip(a, b, strict=False))


def _fault(record: Record, label: str) -> tuple[Verdict, str] | None:
    """What keeps a record from being compared."""
    reason = f"{label}: {record.reason}"
    if record.status in ("INCORRECT", "INVALID"):
        return ("INCORRECT" if record.status == "INCORRECT" else "INVALID"), reason
    if record.status != "OK":
        return "FAILED", f"{label}: {record.status}: {record.reason}"
    machine = record.environment.get("machine_key")
    if not machine or str(machine).startswith(NO_MACHINE):
        return "INVALID", f"{label}: a record does not say of which machine it is"
    if record.latency_median_ms is None or record.basis != "measured":
        return "INVALID", f"{label}: no time was measured"
    seconds = record.latency_median_ms * 1e-3
    fault = fault_of(Reading("OK", seconds=tuple(record.samples_s), median_s=seconds))
    return None if fault is None else ("INVALID", f"{label}: {fault.reason}")


def _differ(first: Sequence[Record], second: Sequence[Record]) -> tuple[Verdict, str] | None:
    for a in first:
        for b in second:
            reason = difference(a.environment, b.environment)
            if reason:
                return "INVALID", reason
    return several_methods(paired_method_of(record.timer, record.l2_state) for record in (*first, *second))


def _runs(records: Sequence[Record]) -> list[_Run]:
    """The runs in order of time."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run_id, []).append(record)
    return [
        _Run(
            own[0].timestamp,
            statistics.median(record.latency_median_ms or 0.0 for record in own) * 1e-3,
            own[0].metrics.get(CONFIRMS),
        )
        for own in runs.values()
    ]


def _in_turn(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether between any two pairs the sides alternate: each pair ends before the next but one begins."""
    pairs = [sorted(times) for times in zip(a, b, strict=False)]
    return all(one[1] <= later[0] for one, later in zip(pairs, pairs[1:], strict=False)) and len(pairs) > 1


def _floor(first: Record, second: Record) -> float | None:
    """The larger floor of the two kernels compared, on the machine of both."""
    known = floors.load(str(second.environment.get("machine_key")))
    names = {f"{record.op}/{record.kernel} {record.case_id} {record.scheme}" for record in (first, second)}
    return max((known[name] for name in names if name in known), default=None)


def _identical(records: Sequence[Record]) -> bool:
    hashes = {record.activity_hash for record in records}
    return len(hashes) == 1 and None not in hashes
