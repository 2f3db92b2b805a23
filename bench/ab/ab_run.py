"""Runs one A/B comparison: checks both sides, measures pairs of processes, confirms differences, and gives verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rooflab.bench.ab.evidence import difference, evidence_of
from rooflab.bench.ab.pairs import AbSettings, JobRunner, SideRecords, run_pairs
from rooflab.bench.ab.sides import SIDES, Comparison, SideName
from rooflab.bench.ab.verdict import (
    BOUNDED_PAIRS,
    SUITE_PAIRS,
    Evidence,
    Outcome,
    judge,
    load_floors,
    wants_confirmation,
)
from rooflab.bench.base.system_time import time
from rooflab.bench.core import NOT_RUN, Record, RunWriter, Status, Verdict


@dataclass(frozen=True)
class AbResult:
    """Holds the result of an A/B run."""

    comparison: Comparison
    settings: AbSettings
    outcomes: tuple[Outcome, ...]
    environments: Mapping[SideName, Mapping[str, Any]]
    """The environment of each side."""
    read: SideRecords
    """First the checks that did not end with OK, then every reading, in time order."""
    stopped: str = ""
    """Why the run measured less than the caller asked for."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Comparisons without an outcome, because their kernels cannot run here, with the reason."""

    def read_of(self, side: SideName, key: str) -> list[Record]:
        return _of(self.read, side, key)


def _of(read: SideRecords, side: SideName, key: str) -> list[Record]:
    return [record for side_name, name, record in read if (side_name, name) == (side, key)]


def run(
    comparison: Comparison,
    settings: AbSettings,
    done: Callable[[str], None] = lambda text: None,
    floors: Mapping[str, float] | None = None,
    *,
    checked: bool = False,
    by_activity: bool = True,
) -> AbResult:
    """Measures and judges an A/B comparison of kernels.  If a kernel fails, its verdict says so, and nothing is raised.

    `floors` holds each kernel's noise floor; None means the stored floors.  `checked=True` skips the kernels' checks.
    `by_activity=True` compares the device code of the sides: a difference with the same code is UNRESOLVED."""
    runner = JobRunner(comparison, settings, set(SIDES) if checked else set())
    start_s = time.monotonic()
    faults: dict[str, tuple[Verdict, str]] = {
        key: ("MISSING", reason) for key in comparison.keys if (reason := comparison.missing(key)) is not None
    }
    failures = [] if checked else _failed_checks(runner, [key for key in comparison.keys if key not in faults], done)
    skip_reasons = {} if comparison.a.functions else _not_timed(comparison, failures)
    keys = [key for key in comparison.keys if key not in skip_reasons]
    valid_keys = [key for key in keys if key not in faults and key not in {key for _, key, _ in failures}]
    environments = runner.environments
    if reason := difference(environments["A"], environments["B"]) if len(environments) == 2 else "":
        faults |= dict.fromkeys(valid_keys, ("INVALID", reason))
        valid_keys = []

    deadline_s = math.inf if settings.budget_s is None else start_s + settings.budget_s
    pair_runner = partial(run_pairs, runner.measure, pairs=settings.pairs, deadline=deadline_s, done=done)

    def evidence(read: SideRecords, floors_here: Mapping[str, float], stopped: str = "") -> list[Evidence]:
        evidence_items = []
        for key in keys:
            records, side_labels = (_of(read, "A", key), _of(read, "B", key)), (comparison.a.label, comparison.b.label)
            key_evidence = evidence_of(
                key, *records, side_labels, settings.rules, floors_here, stopped=stopped, by_activity=by_activity
            )
            evidence_items.append(Evidence(key, broken=faults[key]) if key in faults else key_evidence)
        return evidence_items

    min_pairs = min(SUITE_PAIRS if len(keys) > 1 else BOUNDED_PAIRS, settings.pairs)
    later = min(BOUNDED_PAIRS, settings.pairs)
    first_read, stopped = pair_runner(valid_keys, seed=settings.seed, least=min_pairs, later=later)
    read = failures + first_read
    differing_keys = [item.key for item in evidence(read, {}) if wants_confirmation(item, settings.rules)]
    second_read, second_stopped = pair_runner(differing_keys, seed=settings.seed + 1, confirms=True)
    read += second_read
    floors_here = load_floors(str(environments.get("B", {}).get("machine_key", ""))) if floors is None else floors
    outcomes = tuple(judge(evidence(read, floors_here, second_stopped), settings.rules))
    stopped = stopped or (f"confirmation: {second_stopped}" if second_stopped else "")
    return AbResult(comparison, settings, outcomes, environments, read, stopped, skip_reasons)


def _failed_checks(runner: JobRunner, keys: Sequence[str], done: Callable[[str], None]) -> SideRecords:
    """Checks the kernels of both sides of the comparison.  Returns the results that do not have the status OK."""
    failed_checks: SideRecords = []
    for name in SIDES:
        # A kernel that is wrong on side A is not checked on B; one that cannot run on A is, as it may run on neither.
        wrong_keys = {key for _, key, record in failed_checks if record.status not in NOT_RUN}
        remaining_keys = [key for key in keys if key not in wrong_keys]
        records = runner.check(name, remaining_keys) if remaining_keys else {}
        failed_checks += [
            (name, key, replace(record, run_id=f"check-{name}"))
            for key, record in records.items()
            if record.status != "OK"
        ]
        done(f"check, side {name}")
    return failed_checks


def _not_timed(comparison: Comparison, failed: SideRecords) -> dict[str, str]:
    """Maps each comparison that cannot be timed on this machine to the reason."""
    refusals = {(side, key): record.reason for side, key, record in failed if record.status in NOT_RUN}
    reason_by_key = {}
    for (name, key), reason in refusals.items():
        has_two_kernels = comparison.a.targets[key] != comparison.b.targets[key]
        if has_two_kernels or {("A", key), ("B", key)} <= refusals.keys():
            reason_by_key[key] = f"{comparison.side(name).targets[key].kernel}: {reason}" if has_two_kernels else reason
    return reason_by_key


METRICS = (
    "effect effect_low effect_high smallest_visible_effect pairs_for_1_percent p_value noise_floor pairs"
).split()
_STATUS_BY_VERDICT: dict[str, Status] = {
    "INCORRECT": "INCORRECT",
    "FAILED": "RUNTIME_ERROR",
    "INVALID": "INVALID",
    "MISSING": "INVALID",
}


def save(result: AbResult, folder: Path) -> list[Path]:
    """Writes the verdicts to `<run>.jsonl`, and the measurements of both sides to `<run>-A.jsonl` and `<run>-B.jsonl`.

    `rooflab ab --records <run>-A.jsonl --records <run>-B.jsonl` judges these measurements again.
    """
    writer = RunWriter(folder)
    run_id, writers = writer.run_id, [writer]
    writer.write(*(_verdict(result, outcome, run_id) for outcome in result.outcomes))
    for name in SIDES:
        side, environment = result.comparison.side(name), result.environments.get(name, {})
        records = [record for side_name, _, record in result.read if side_name == name] + _not_measured(result, name)
        runs = [replace(record, run_id=f"{run_id}-{record.run_id}") for record in records]
        writers.append(RunWriter(folder, run_id, f"-{name}"))
        writers[-1].write(*(replace(r, environment=environment, commit=side.commit, dirty=side.dirty) for r in runs))
    return [run_writer.path for run_writer in writers if run_writer.path.is_file()]


def _not_measured(result: AbResult, name: SideName) -> list[Record]:
    """Returns an INVALID record for each untimed kernel of one side, so that the saved files also name this kernel."""
    reason_by_key = {**result.left_out} | {outcome.key: outcome.reason for outcome in result.outcomes}
    return [
        replace(
            target.record(result.settings.device, result.settings.seed),
            run_id=f"check-{name}",
            status="INVALID",
            reason=f"not measured: {reason_by_key.get(key, '')}",
        )
        for key, target in result.comparison.side(name).targets.items()
        if not result.read_of(name, key)
    ]


def _verdict(result: AbResult, outcome: Outcome, run_id: str) -> Record:
    a, b = result.comparison.a, result.comparison.b
    baseline_target = a.targets[outcome.key]
    pair_times = (*outcome.evidence.first, *outcome.evidence.second) if outcome.evidence else ()
    records = [record for record in result.read_of("B", outcome.key) if "pair" in record.metrics]
    blank_record = b.targets.get(outcome.key, baseline_target).record(result.settings.device, result.settings.seed)
    metric_values = {name: getattr(outcome, name) for name in METRICS}
    record_status = _STATUS_BY_VERDICT.get(outcome.verdict, "OK")
    return replace(
        records[0] if records else blank_record,
        kind="ab",
        run_id=run_id,
        timestamp="",
        status=record_status,
        reason=outcome.reason or ("" if record_status == "OK" else outcome.verdict),
        environment=result.environments.get("B") or result.environments.get("A") or {},
        commit=b.commit,
        dirty=b.dirty,
        basis="measured" if pair_times and record_status == "OK" else "bound",
        latency_median_ms=_ms(outcome.candidate_s) if record_status == "OK" else None,
        samples=Record.packed([candidate_time for _, candidate_time in pair_times]) if pair_times else None,
        sample_count=len(pair_times) or None,
        baseline={
            "label": a.label,
            "kernel": baseline_target.kernel,
            "commit": a.commit,
            "dirty": a.dirty,
            "latency_median_ms": _ms(outcome.baseline_s),
            "samples": Record.packed([baseline_time for baseline_time, _ in pair_times]) if pair_times else None,
        },
        verdict=outcome.verdict,
        metrics={name: float(metric_value) for name, metric_value in metric_values.items() if metric_value is not None},
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
