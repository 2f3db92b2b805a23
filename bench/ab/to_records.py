"""An A/B as records: one for each verdict, and one for each reading, so that it can be judged again from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from rooflab.bench.ab.pairs import Reading, SideName
from rooflab.bench.ab.run import Result
from rooflab.bench.ab.verdict import Outcome
from rooflab.bench.records.files import write
from rooflab.bench.records.record import DeviceType, Record, Status, new_run_id, now
from rooflab.bench.records.samples import pack_samples
from rooflab.kernels.registry import Backend, Role
from rooflab.reference.spec import Case

METRICS = (
    "effect",
    "effect_low",
    "effect_high",
    "smallest_visible_effect",
    "pairs_for_1_percent",
    "p_value",
    "noise_floor",
    "pairs",
)
CONFIRMS = "confirms"
"""Among the metrics of a reading: 1 where its pair is of the second batch, 0 where of the first."""
_STATUS: dict[str, Status] = {
    "INCORRECT": "INCORRECT",
    "FAILED": "RUNTIME_ERROR",
    "INVALID": "INVALID",
    "MISSING": "INVALID",
}


def save(result: Result, folder: Path) -> list[Path]:
    """Writes `<run>.jsonl` with the verdicts, and `<run>-A.jsonl` and `<run>-B.jsonl` with every process' readings.

    `rooflab ab --records <run>-A.jsonl --records <run>-B.jsonl` judges those again.
    """
    run_id = new_run_id()
    paths = [folder / f"{run_id}{part}.jsonl" for part in ("", "-A", "-B")]
    write(paths[0], *(_verdict(result, outcome, run_id) for outcome in result.outcomes))
    sides: tuple[SideName, ...] = ("A", "B")
    for side, path in zip(sides, paths[1:], strict=True):
        write(path, *_readings(result, side, run_id))
    return [path for path in paths if path.is_file()]


def _verdict(result: Result, outcome: Outcome, run_id: str) -> Record:
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


def _readings(result: Result, side: SideName, run_id: str) -> Iterator[Record]:
    """One bench record for each process and kernel; a process is a run.

    What was not measured has one too, or who judges the files would not know of it.
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
            metrics=metrics,
            **_observed(reading),
        )


def _not_measured(result: Result, side: SideName, key: str) -> Reading:
    """What stands for a kernel that no process has timed: its check, or why there was nothing to time."""
    outcome = next((found for found in result.outcomes if found.key == key), None)
    reason = outcome.reason if outcome else result.left_out.get(key, "")
    return result.checks.get((side, key)) or Reading("INVALID", f"not measured: {reason}")


def _names(result: Result, side: SideName, key: str) -> dict[str, Any]:
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
