"""An A/B as records, and two record files or folders as its sides: missing, wrong or foreign records never pass.

A record is the reading of one process.  Records of two sides that alternate in time are pairs.  If one side was
measured only after the other, the machine may have drifted: such an effect has a verdict only where it is far beyond
that (`drift`).  Records of an A/B say whether they confirm; of other records, the first half calls a difference and the
second half confirms it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from rooflab.bench.ab.pairs import fault_of
from rooflab.bench.ab.run import AbResult, difference, one_activity, several_methods
from rooflab.bench.ab.sides import SIDES, Reading, SideName
from rooflab.bench.ab.verdict import (
    BOUNDED_PAIRS,
    EXIT_STATUS,
    Evidence,
    Outcome,
    Rules,
    judge,
    load_floors,
    wants_confirmation,
)
from rooflab.bench.core.record import (
    NOT_RUN,
    DeviceType,
    Record,
    Status,
    Verdict,
    new_run_id,
    now,
    pack_samples,
    paired_method_of,
)
from rooflab.bench.core.record_files import read, write
from rooflab.bench.core.statuses import ExitStatus
from rooflab.kernels.registry import Backend, Role
from rooflab.reference.spec import Case

NO_MACHINE = ("unknown", "imported-unknown-")
"""Prefixes of the keys of unknown machines."""
APART = "the sides were not measured in turn, so that a drift of the machine may be all that they show"


def compare_files(a: Path, b: Path, rules: Rules, kernels: Sequence[str] = ()) -> list[Outcome]:
    """The outcomes of every kernel, case and scheme that has a record on side A.

    With two `kernels`, side A is the first kernel and side B the second.  Raises `ValueError` on a file that cannot be
    read: truncated, of a newer schema, or missing.  Raises it also if the sides are not two: they share a run, or one
    side has several commits.
    """
    if len(kernels) not in (0, 2):
        raise ValueError(f"kernel: expected two or none beside records, got {len(kernels)}")
    named = kernels or (None, None)
    sides = [_by_key(read(path), kernel) for path, kernel in zip((a, b), named, strict=True)]
    labels = (str(a), str(b))
    evidence = []
    for key in sides[0]:
        _check_apart(key, sides[0][key], sides[1].get(key, []), labels)
        found = _evidence_of(key, sides[0][key], sides[1].get(key, []), labels, rules)
        if found is not None:
            evidence.append(found)
    return judge(evidence, rules)


def only_in(a: Path, b: Path) -> list[str]:
    """Comparisons that B has and A lacks: they are new, and there is nothing to compare them with."""
    known = _by_key(read(a))
    return [key for key in _by_key(read(b)) if key not in known]


def _by_key(records: Sequence[Record], kernel: str | None = None) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.timestamp):
        if record.kind == "bench" and record.op and kernel in (None, record.kernel):
            theirs = (record.environment.get("imported") or {}).get("benchmark") or {}
            name = record.op if kernel else f"{record.op}/{record.kernel}"
            key = " ".join(part for part in (name, record.case_id, record.scheme) if part)
            if theirs.get("fullname") and not kernel:  # pytest's own id: a group or a parameter's text may change
                key = str(theirs["fullname"])
            found.setdefault(key, []).append(record)
    return found


def _check_apart(key: str, first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str]) -> None:
    """Raises `ValueError` if a run is on both sides, or if a side has several commits."""
    runs = [{(record.run_id, record.kernel) for record in records} for records in (first, second)]
    common = sorted(run for run, _ in runs[0] & runs[1])
    if common:
        raise ValueError(f"records: expected two sides, got the run {common[0]} of {key} on both")
    for records, label in ((first, labels[0]), (second, labels[1])):
        found = {(str(record.commit)[:10], record.dirty) for record in records}
        if len(found) > 1:
            names = sorted(f"{commit} and changes" if dirty else commit for commit, dirty in found)
            raise ValueError(f"records: expected one commit in {label}, got {', '.join(names)} of {key}")


def _evidence_of(
    key: str, first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str], rules: Rules
) -> Evidence | None:
    if not second:
        return Evidence(key, broken=("MISSING", f"{labels[0]} has it, {labels[1]} has not: removed or renamed"))
    if all(record.status in NOT_RUN for record in (*first, *second)):
        return None  # the kernel can run on neither side
    first, second = _counted(first, second)
    faults = [
        fault
        for records, label in ((first, labels[0]), (second, labels[1]))
        for record in records
        if (fault := _fault(record, label)) is not None
    ]
    # The worst fault: if one side broke, the other side was not measured.
    broken = min(faults, key=lambda fault: list(ExitStatus).index(EXIT_STATUS[fault[0]]), default=None)
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
        drift=drift(*([(run.timestamp, run.seconds) for run in side] for side in (a, b))),
        noise_floor=_floor_of_records(first[0], second[0]),
        identical=one_activity(record.activity_hash for record in (*first, *second)),
        unconfirmed=few if count < 2 * BOUNDED_PAIRS else "",
    )


def _counted(first: Sequence[Record], second: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record]]:
    """Both sides without the pairs of an A/B that have a NOISY reading, which the A/B itself does not count either."""
    pairs = {id(record): record.run_id[:-1] for record in (*first, *second) if "pair" in record.metrics}
    noisy = {pairs.get(id(record)) for record in (*first, *second) if record.status == "NOISY"} - {None}
    kept = tuple([record for record in side if pairs.get(id(record)) not in noisy] for side in (first, second))
    return (kept[0], kept[1]) if all(kept) else (first, second)


class _Run(NamedTuple):
    """One process of a side."""

    timestamp: str
    seconds: float
    """Median over the records of the run."""
    confirms: float | None
    """For an A/B: whether its pair is in the second batch."""


_Pairs = tuple[tuple[float, float], ...]


def _batches(a: Sequence[_Run], b: Sequence[_Run], rules: Rules) -> tuple[_Pairs, _Pairs]:
    """The pairs of the first batch and of the second; if the first half calls no difference, all are in the first."""
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
    """Why a record cannot be compared."""
    reason = f"{label}: {record.reason}"
    if record.status in ("INCORRECT", "INVALID", "NOISY"):
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
    """Whether the sides alternate between any two pairs: each pair ends before the pair after the next one begins."""
    pairs = [sorted(times) for times in zip(a, b, strict=False)]
    return all(one[1] <= later[0] for one, later in zip(pairs, pairs[1:], strict=False)) and len(pairs) > 1


def drift(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]]) -> float:
    """How far a machine may have drifted between two sides, each its runs' times and seconds, as a log ratio.

    It is the largest change within a side, and grows with the square root of the time between the sides, as that of a
    random walk does.  Among 10,000 simulated random walks, with sides up to 1,000 times their length apart, none went
    `BEYOND_DRIFT` times as far (tests/test_ab_estimate.py).  A day between sides of ten minutes makes it 12 times as
    large.  Infinite for a side without two times.
    """
    times = [[datetime.fromisoformat(stamp).timestamp() for stamp, _ in side] for side in (a, b)]
    span = min((max(side) - min(side) for side in times if side), default=0.0)
    if not span > 0:
        return math.inf
    seen = max(math.log(max(seconds) / min(seconds)) for seconds in ([value for _, value in side] for side in (a, b)))
    apart = abs(statistics.fmean(times[1]) - statistics.fmean(times[0]))
    return seen * math.sqrt(max(1.0, apart / span))


def _floor_of_records(first: Record, second: Record) -> float | None:
    """The larger noise floor of the two compared kernels, on the machine of both."""
    known = load_floors(str(second.environment.get("machine_key")))
    names = {f"{record.op}/{record.kernel} {record.case_id} {record.scheme}" for record in (first, second)}
    return max((known[name] for name in names if name in known), default=None)


METRICS = (
    "effect effect_low effect_high smallest_visible_effect pairs_for_1_percent p_value noise_floor pairs"
).split()
CONFIRMS = "confirms"
"""Name of a metric of a reading: 1 if its pair is in the second batch, 0 if in the first."""
_STATUS: dict[str, Status] = {
    "INCORRECT": "INCORRECT",
    "FAILED": "RUNTIME_ERROR",
    "INVALID": "INVALID",
    "MISSING": "INVALID",
}


def save(result: AbResult, folder: Path) -> list[Path]:
    """Writes `<run>.jsonl` with the verdicts, and `<run>-A.jsonl` and `<run>-B.jsonl` with every process' readings.

    `rooflab ab --records <run>-A.jsonl --records <run>-B.jsonl` judges these readings again.
    """
    run_id = new_run_id()
    paths = [folder / f"{run_id}{part}.jsonl" for part in ("", "-A", "-B")]
    write(paths[0], *(_verdict(result, outcome, run_id) for outcome in result.outcomes))
    for side, path in zip(SIDES, paths[1:], strict=True):
        write(path, *_readings(result, side, run_id))
    return [path for path in paths if path.is_file()]


def _verdict(result: AbResult, outcome: Outcome, run_id: str) -> Record:
    a, b = result.comparison.a, result.comparison.b
    baseline = a.targets.get(outcome.key)
    pairs = (*outcome.evidence.first, *outcome.evidence.second) if outcome.evidence else ()
    read = [found for _, side, key, found in result.first.readings if key == outcome.key and side == "B"]
    numbers = {name: getattr(outcome, name) for name in METRICS}
    status = _STATUS.get(outcome.verdict, "OK")
    return Record(
        kind="ab",
        run_id=run_id,
        status=status,
        reason=outcome.reason or ("" if status == "OK" else outcome.verdict),
        environment=result.environments.get("B") or result.environments.get("A") or {},
        commit=b.commit,
        dirty=b.dirty,
        **_names(result, "B", outcome.key),
        seed=result.settings.seed,
        basis="measured" if pairs and status == "OK" else "bound",
        latency_median_ms=_ms(outcome.candidate_s) if status == "OK" else None,
        samples=pack_samples([second for _, second in pairs]) if pairs else None,
        sample_count=len(pairs) or None,
        **(_observed(read[0]) if read else {}),
        baseline={
            "label": a.label,
            "kernel": baseline.kernel if baseline else None,
            "commit": a.commit,
            "dirty": a.dirty,
            "latency_median_ms": _ms(outcome.baseline_s),
            "samples": pack_samples([first for first, _ in pairs]) if pairs else None,
        },
        verdict=outcome.verdict,
        metrics={name: float(value) for name, value in numbers.items() if value is not None},
    )


def _readings(result: AbResult, side: SideName, run_id: str) -> Iterator[Record]:
    """One bench record for each process and kernel; a process is a run.

    A kernel that was not measured has a record too; otherwise a later judge of the files would not know of it.
    """
    own = result.comparison.side(side)
    batches = (("first", result.first), ("second", result.second))
    found = [
        (f"{name}-{pair}", {"pair": float(pair), CONFIRMS: float(name == "second")}, key, reading)
        for name, batch in batches
        for pair, where, key, reading in batch.readings
        if where == side
    ]
    measured = {key for _, _, key, _ in found}
    unmeasured = [key for key in result.comparison.keys if key not in measured and key in own.targets]
    found += [("check-", {}, key, _not_measured(result, side, key)) for key in unmeasured]
    for name, metrics, key, reading in found:
        timed = reading.status == "OK" and reading.median_s is not None
        first = {} if reading.first_call_s is None else {"first_call_ms": reading.first_call_s * 1e3}
        yield Record(
            kind="bench",
            run_id=f"{run_id}-{name}{side}",
            status=reading.status,
            reason=reading.reason,
            timestamp=reading.timestamp or now(),
            environment=result.environments.get(side, {}),
            commit=own.commit,
            dirty=own.dirty,
            **_names(result, side, key),
            seed=result.settings.seed,
            basis="measured" if timed else "bound",
            latency_median_ms=_ms(reading.median_s) if timed else None,
            samples=pack_samples(reading.seconds) if timed else None,
            sample_count=len(reading.seconds) or None,
            metrics=metrics | first,
            **_observed(reading),
        )


def _not_measured(result: AbResult, side: SideName, key: str) -> Reading:
    """The reading of a kernel that no process has timed: its check, or the reason why there was nothing to time."""
    outcome = next((found for found in result.outcomes if found.key == key), None)
    reason = outcome.reason if outcome else result.left_out.get(key, "")
    return result.checks.get((side, key)) or Reading("INVALID", f"not measured: {reason}")


def _names(result: AbResult, side: SideName, key: str) -> dict[str, Any]:
    targets = result.comparison.side(side).targets
    target = targets.get(key) or result.comparison.a.targets.get(key)
    device = cast(DeviceType, result.settings.device.split(":")[0])
    if target is None:
        return {"op": key, "kernel": result.comparison.side(side).label, "device": device}
    return {
        "op": target.op,
        "kernel": target.kernel,
        "case_id": target.case_id,
        "case": dict(Case.parse(target.case_id)) if target.case_id else {},
        "scheme": target.scheme,
        "device": device,
    }


def _observed(reading: Reading) -> dict[str, Any]:
    return {
        "role": cast(Role | None, reading.role),
        "backend": cast(Backend | None, reading.backend),
        "timer": reading.method or None,
        "l2_state": reading.l2_state,
        "flops": reading.flops,
        "least_bytes": reading.least_bytes,
        "device_kernels": reading.device_kernels,
        "activity_hash": reading.activity_hash,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
