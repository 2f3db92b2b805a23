"""Two record files (or folders) as the sides of an A/B: what is missing, wrong or of another machine never passes.

A record is one process' reading.  Records of the two sides that alternate in time are pairs; those of one side made
after all of the other's are not, and then a difference is shown and not called, because the machine may have drifted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rooflab.bench.ab import floors
from rooflab.bench.ab.pairs import Reading, fault_of
from rooflab.bench.ab.run import difference
from rooflab.bench.ab.verdict import Evidence, Outcome, Rules, judge, wants_confirmation
from rooflab.bench.record_files import read
from rooflab.bench.records import Record, Verdict

NOT_RUN = ("UNSUPPORTED", "UNAVAILABLE")
APART = "the sides were not measured in turn, so that a drift of the machine may be all that they show"


def compare_files(a: Path, b: Path, rules: Rules, kernels: Sequence[str] = ()) -> list[Outcome]:
    """The outcomes of every kernel, case and scheme that side A has been measured on.

    With two `kernels`, side A is the first of them and side B the second.  Raises `ValueError` on a file that cannot be
    read: truncated, of a newer schema, or not there.
    """
    if len(kernels) not in (0, 2):
        raise ValueError(f"kernel: expected two or none beside records, got {len(kernels)}")
    named = kernels or (None, None)
    sides = [_by_key(read(path), kernel) for path, kernel in zip((a, b), named, strict=True)]
    labels = (str(a), str(b))
    evidence = []
    for key in sides[0]:
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


def _evidence(
    key: str, first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str], rules: Rules
) -> Evidence | None:
    if not second:
        return Evidence(key, broken=("MISSING", f"{labels[0]} has it, {labels[1]} has not: removed or renamed"))
    if all(record.status in NOT_RUN for record in (*first, *second)):
        return None  # it can run on neither side
    broken = next(
        (
            fault
            for records, label in ((first, labels[0]), (second, labels[1]))
            for record in records
            if (fault := _fault(record, label)) is not None
        ),
        None,
    ) or _differ(first, second)
    if broken is not None:
        return Evidence(key, broken=broken)
    a, b = _medians(first), _medians(second)
    count = min(len(a), len(b))
    pairs = [(a[index][1], b[index][1]) for index in range(count)]
    # The first half calls, the second confirms, as in a run of its own.
    half = (count + 1) // 2
    evidence = Evidence(
        key=key,
        first=tuple(pairs),
        drifting="" if _in_turn([run for run, _ in a], [run for run, _ in b]) else APART,
        noise_floor=_floor(first[0], second[0]),
        identical=_identical([*first, *second]),
        unconfirmed=f"{count} runs of each side; at least 10 are needed, half of them to confirm",
    )
    halves = Evidence(key, first=tuple(pairs[:half])), Evidence(key, first=tuple(pairs[half:]))
    if count >= 10 and all(wants_confirmation(part, rules) for part in halves):
        return Evidence(**{**vars(evidence), "first": tuple(pairs[:half]), "second": tuple(pairs[half:])})
    return evidence


def _fault(record: Record, label: str) -> tuple[Verdict, str] | None:
    """What keeps a record from being compared."""
    reason = f"{label}: {record.reason}"
    if record.status in ("INCORRECT", "INVALID"):
        return ("INCORRECT" if record.status == "INCORRECT" else "INVALID"), reason
    if record.status != "OK":
        return "FAILED", f"{label}: {record.status}: {record.reason}"
    if record.latency_median_ms is None or record.basis != "measured":
        return "INVALID", f"{label}: no time was measured"
    seconds = record.latency_median_ms * 1e-3
    fault = fault_of(Reading("OK", seconds=tuple(record.samples_s), median_s=seconds))
    return None if fault is None else ("INVALID", f"{label}: {fault.reason}")


def _differ(first: Sequence[Record], second: Sequence[Record]) -> tuple[Verdict, str] | None:
    for a in first:
        for b in second:
            reason = difference(a.environment, b.environment)
            if not reason and a.timer != b.timer:
                reason = f"the sides were timed by different methods: {a.timer} and {b.timer}"
            if reason:
                return "INVALID", reason
    return None


def _medians(records: Sequence[Record]) -> list[tuple[str, float]]:
    """When a run was made and its median in seconds, one for each run."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run_id, []).append(record)
    return [
        (own[0].timestamp, statistics.median(record.latency_median_ms or 0.0 for record in own) * 1e-3)
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
