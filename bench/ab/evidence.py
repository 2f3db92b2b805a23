"""Builds the evidence of an A/B comparison from the records of a run, or of two files or folders.

A record holds the measurement of one process.  If the two sides alternate in time, their records form pairs.  Otherwise
the machine may have drifted, and an effect must be much larger than this drift (`drift`).

The first batch of pairs finds a difference, and the second batch confirms it.  A comparison never passes if its records
are missing, wrong or from another machine.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

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
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.core import NOT_RUN, Record, Verdict, read

NO_MACHINE = ("unknown", "imported-unknown-")
"""The prefixes of the machine keys of unknown machines."""
CONFIRMS = "confirms"
"""The name of a metric of an A/B's reading: 1 if the pair is in the second batch, 0 if it is in the first."""
SAME_HARDWARE = ("machine_key", "cpu", "cores", "threads")
DRIFT_WARNING = "the sides were not measured in turn, so that a drift of the machine may be all that they show"


def compare_files(a: Path, b: Path, rules: Rules, kernels: Sequence[str] = ()) -> list[Outcome]:
    """Compares the records in `a` and `b`.  Returns one outcome for each kernel, case and scheme (dtypes) in `a`.

    With two names in `kernels`, side A is the first kernel and side B the second.  A comparison that ran on neither
    side is left out.  Raises `ValueError` if a file cannot be read, or if the sides' records do not fit together."""
    if len(kernels) not in (0, 2):
        raise ValueError(f"kernel: expected two or none beside records, got {len(kernels)}")
    kernel_names = kernels or (None, None)
    side_records = [_by_key(read(path), kernel) for path, kernel in zip((a, b), kernel_names, strict=True)]
    side_labels = (str(a), str(b))
    evidence = []
    for key, first_records in side_records[0].items():
        second_records = side_records[1].get(key, [])
        _check_apart(key, first_records, second_records, side_labels)
        if not second_records:
            missing_reason = f"{side_labels[0]} has it, {side_labels[1]} has not: removed or renamed"
            evidence.append(Evidence(key, broken=("MISSING", missing_reason)))
        elif any(record.status not in NOT_RUN for record in (*first_records, *second_records)):
            noise_floors = load_floors(str(second_records[0].environment.get("machine_key")))
            item = evidence_of(key, first_records, second_records, side_labels, rules, noise_floors)
            mismatch_reason = None if item.broken else _foreign(first_records, second_records, side_labels)
            evidence.append(replace(item, broken=("INVALID", mismatch_reason)) if mismatch_reason else item)
    return judge(evidence, rules)


def only_in(a: Path, b: Path) -> list[str]:
    """Returns the comparisons that only side B has.  They are new, so side A has nothing to compare with them."""
    keys_in_a = _by_key(read(a))
    return [key for key in _by_key(read(b)) if key not in keys_in_a]


def _by_key(records: Sequence[Record], kernel: str | None = None) -> dict[str, list[Record]]:
    records_by_key: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.timestamp):
        if record.kind == "bench" and record.op and kernel in (None, record.kernel):
            pytest_info = (record.environment.get("imported") or {}).get("benchmark") or {}
            name = record.op if kernel else f"{record.op}/{record.kernel}"
            key = " ".join(key_part for key_part in (name, record.case_id, record.scheme) if key_part)
            if pytest_info.get("fullname") and not kernel:  # pytest's own id: a group or a parameter's text may change
                key = str(pytest_info["fullname"])
            records_by_key.setdefault(key, []).append(record)
    return records_by_key


def _check_apart(key: str, first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str]) -> None:
    """Raises `ValueError` if both sides have records of the same run, or one side has records of several commits."""
    runs_by_side = [{(record.run_id, record.kernel) for record in records} for records in (first, second)]
    common_runs = sorted(run for run, _ in runs_by_side[0] & runs_by_side[1])
    if common_runs:
        raise ValueError(f"records: expected two sides, got the run {common_runs[0]} of {key} on both")
    for records, side_label in ((first, labels[0]), (second, labels[1])):
        commits = {(str(record.commit)[:10], record.dirty) for record in records}
        if len(commits) > 1:
            commit_names = sorted(f"{commit} and changes" if is_dirty else commit for commit, is_dirty in commits)
            raise ValueError(f"records: expected one commit in {side_label}, got {', '.join(commit_names)} of {key}")


def _foreign(first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str]) -> str:
    """Returns how the machines of the records differ, or an empty text if all records come from one machine."""
    for records, side_label in zip((first, second), labels, strict=True):
        if any(str(record.environment.get("machine_key") or "unknown").startswith(NO_MACHINE) for record in records):
            return f"{side_label}: a record does not say of which machine it is"
    differences = (difference(a.environment, b.environment) for a, b in product(first, second))
    return next(filter(None, differences), "")


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Describes the first difference in hardware, driver or settings of two environments; empty if they are equal."""
    gpus = a.get("gpu") or {}, b.get("gpu") or {}
    for name in ("name", "driver", "max_sm_clock_mhz", "power_limit_w", "mig"):
        if gpus[0].get(name) != gpus[1].get(name):
            return f"the sides ran on different GPUs or drivers: {name} {gpus[0].get(name)} and {gpus[1].get(name)}"
    for name in SAME_HARDWARE:
        if a.get(name) != b.get(name):
            return f"the sides ran on different machines or settings: {name} {a.get(name)} and {b.get(name)}"
    return ""


def evidence_of(
    key: str,
    first: Sequence[Record],
    second: Sequence[Record],
    labels: tuple[str, str],
    rules: Rules,
    floors: Mapping[str, float],
    *,
    stopped: str = "",
    by_activity: bool = True,
) -> Evidence:
    """Returns the evidence on one comparison from the records of side A (`first`) and side B (`second`).

    `floors` holds the noise floor of each kernel.  `stopped` is the reason why the confirming batch has fewer pairs
    than requested.  `by_activity=False` ignores whether both sides ran the same device code."""
    first, second = _counted(first, second)
    records = [*first, *second]
    if fault := _broken(first, second, labels):
        return Evidence(key, broken=fault)
    a, b = _runs(first), _runs(second)
    first_pairs, second_pairs = _batches(a, b, rules)
    count = len(first_pairs) + len(second_pairs)
    lack = f"{count} runs of each side; at least {2 * BOUNDED_PAIRS} are needed, half of them to confirm"
    noise_floors = {floors.get(f"{record.op}/{record.kernel} {record.case_id} {record.scheme}") for record in records}
    activity_hashes = {record.activity_hash for record in records if not record.metrics.get(CONFIRMS)}
    return Evidence(
        key=key,
        first=first_pairs,
        second=second_pairs,
        drifting="" if _in_turn([run.timestamp for run in a], [run.timestamp for run in b]) else DRIFT_WARNING,
        drift=drift(*([(run.timestamp, run.seconds) for run in runs_of_side] for runs_of_side in (a, b))),
        noise_floor=max((noise_floor for noise_floor in noise_floors if noise_floor is not None), default=None),
        identical=by_activity and len(activity_hashes) == 1 and None not in activity_hashes,
        unconfirmed=f"seen once and not confirmed: {stopped}" if stopped else lack if count < 2 * BOUNDED_PAIRS else "",
    )


def _counted(first: Sequence[Record], second: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Returns both sides' records without pairs with a NOISY record.  Keeps such pairs if their batch has no others."""
    pairs = {id(record): record.run_id[:-1] for record in (*first, *second) if "pair" in record.metrics}
    noisy = {pairs.get(id(record)) for record in (*first, *second) if record.status == "NOISY"} - {None}
    timed = [record for record in (*first, *second) if record.status in ("OK", "NOISY")]
    sound = {record.metrics.get(CONFIRMS) for record in timed if pairs.get(id(record)) not in noisy}
    lost = {id(record) for record in timed if pairs.get(id(record)) in noisy and record.metrics.get(CONFIRMS) in sound}
    a, b = ([record for record in side if id(record) not in lost] for side in (first, second))
    return a, b


def _broken(first: Sequence[Record], second: Sequence[Record], labels: tuple[str, str]) -> tuple[Verdict, str] | None:
    """Returns a verdict and its reason if the records of the two sides cannot be compared, else None.

    The reason is the worst fault of a record, such as a wrong kernel.  Without a fault, it is a difference in timing
    methods, such as warm and cold L2 caches."""
    ranked_faults = []
    for records, side_label in zip((first, second), labels, strict=True):
        for record in records:
            if (fault := fault_of(record)) is not None:
                fault_rank = list(ExitStatus).index(EXIT_STATUS[fault[0]]), record.status in NOT_RUN
                ranked_faults.append((fault_rank, (fault[0], f"{side_label}: {fault[1]}")))
    if ranked_faults:
        return min(ranked_faults, key=lambda fault: fault[0])[1]
    # Whether a CPU's threads were pinned may differ between processes of one kernel: under other load, 2 of 12 did not
    # find theirs.  Unpinned threads add equal noise to both sides.
    names = dict.fromkeys(re.sub(r", threads (not )?pinned[^,]*", "", reading.method) for reading in (*first, *second))
    return ("INVALID", f"it was timed by different methods: {' and '.join(names)}") if len(names) > 1 else None


def fault_of(record: Record) -> tuple[Verdict, str] | None:
    """Returns the verdict and the reason if a record cannot be compared: its status is not OK, or its time invalid."""
    median_ms, sample_times = record.latency_median_ms, record.samples_s
    if record.status == "INCORRECT":
        return "INCORRECT", record.reason
    if record.status in ("INVALID", "NOISY"):
        return "INVALID", record.reason
    if record.status != "OK":
        return "FAILED", f"{record.status}: {record.reason}"
    if median_ms is None or record.basis != "measured":
        return "INVALID", "no time was measured"
    if not all(map(math.isfinite, (median_ms, *sample_times))):
        return "INVALID", "a sample is not a finite number"
    if median_ms <= 0 or any(value < 0 for value in sample_times):
        return "INVALID", "the timer did not move while the kernel ran"
    return None


class _Run(NamedTuple):
    """Describes the measurement of one process of a side."""

    timestamp: str
    seconds: float
    """The median over the records of the run."""
    confirms: float | None
    """For an A/B, 1 if the pair is in the second batch and 0 if it is in the first; else None."""


_TimePairs = tuple[tuple[float, float], ...]


def _batches(a: Sequence[_Run], b: Sequence[_Run], rules: Rules) -> tuple[_TimePairs, _TimePairs]:
    """Returns the timed pairs of the first batch, and those of the second batch, which must confirm the first.  The
    second batch is empty if the first shows no difference."""
    if all(run.confirms is not None for run in (*a, *b)):
        first_pairs, second_pairs = (
            _paired(*([run for run in side if run.confirms == confirms] for side in (a, b))) for confirms in (0, 1)
        )
        return first_pairs, second_pairs
    all_pairs = _paired(a, b)
    num_first_pairs = (len(all_pairs) + 1) // 2
    if wants_confirmation(Evidence("", first=all_pairs[:num_first_pairs]), rules):
        return all_pairs[:num_first_pairs], all_pairs[num_first_pairs:]
    return all_pairs, ()


def _paired(a: Sequence[_Run], b: Sequence[_Run]) -> _TimePairs:
    return tuple((first_run.seconds, second_run.seconds) for first_run, second_run in zip(a, b, strict=False))


def _runs(records: Sequence[Record]) -> list[_Run]:
    """Groups the records by run (one process).  Returns each run with its median time in seconds, in record order."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run_id, []).append(record)
    return [
        _Run(
            run_records[0].timestamp,
            statistics.median(record.latency_median_ms or 0.0 for record in run_records) * 1e-3,
            run_records[0].metrics.get(CONFIRMS),
        )
        for run_records in runs.values()
    ]


def _in_turn(a: Sequence[str], b: Sequence[str]) -> bool:
    """Tells whether two sides were measured alternately.  Each pair of measurements must end before the next begins."""
    time_pairs = [sorted(pair_times) for pair_times in zip(a, b, strict=False)]
    return all(pair[1] <= next_pair[0] for pair, next_pair in pairwise(time_pairs)) and len(time_pairs) > 1


def drift(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]]) -> float:
    """Returns a machine's possible drift between two sides, as a log ratio.  A side has pairs `(time of run, seconds)`.

        drift = change * sqrt(max(1, gap / span))

    `change` is the largest log ratio of two `seconds` of one side.  `gap` is the time between the sides' mean run
    times. `span` is the time from the first to the last run of the shorter side.  If it is 0, the drift is infinite.

    The formula follows a random walk.  In 10,000 simulated walks with gaps of up to 1,000 spans, none went further than
    `BEYOND_DRIFT` times the drift (tests/ab/test_ab_estimate.py)."""
    run_times = [[datetime.fromisoformat(timestamp).timestamp() for timestamp, _ in side] for side in (a, b)]
    span_s = min((max(side) - min(side) for side in run_times if side), default=0.0)
    if not span_s > 0:
        return math.inf
    change = max(math.log(max(seconds) / min(seconds)) for seconds in ([value for _, value in side] for side in (a, b)))
    gap_s = abs(statistics.fmean(run_times[1]) - statistics.fmean(run_times[0]))
    return change * math.sqrt(max(1.0, gap_s / span_s))
