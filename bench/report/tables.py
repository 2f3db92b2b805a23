"""Makes three tables of a report: A/B verdicts, properties of compiled code, and runs of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rooflab.bench.base.plain import Row
from rooflab.bench.core import Record
from rooflab.bench.report.facts import commit_text, facts_of, predicted, value_text
from rooflab.bench.report.ledgers import CASE_ID
from rooflab.bench.report.sources import FINE_STATUSES, NOT_WRONG_STATUSES, Located, grouped, machine_of, newest
from rooflab.kernels import registry
from rooflab.roofline.numbers import metric_label, metric_text, percent, plain_value

MERGE_BLOCKERS = ("INCORRECT", "FAILED", "INVALID", "MISSING", "SLOWER")
"""The verdicts that stop a merge.  UNRESOLVED stops a merge only under --strict."""
_ORDER = ("NO VERDICT", *MERGE_BLOCKERS, "UNRESOLVED", "FASTER", "SAME")


def comparisons_of(located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns the newest A/B verdict of each machine, kernel, case and baseline.  Merge blockers come first.

    `why` is the record's reason.  If the verdict has no other reason, it is the effect: 0.03 means that the kernel
    (side B) takes 3% more time than its baseline (side A).  `stops` tells whether the verdict stops a merge."""
    items = newest(
        (item for item in located if item.record.kind == "ab"),
        lambda row: (machine_of(row), row.op, row.kernel, row.case_id, row.scheme, _baseline(row)),
    )
    rows = []
    for item in items:
        record = item.record
        verdict = record.verdict or (record.status if record.status not in FINE_STATUSES else "NO VERDICT")
        name = f"{record.op}/{record.kernel}" if record.op else record.kernel or "own function"
        is_blocker = verdict in ("NO VERDICT", *MERGE_BLOCKERS) or record.status not in FINE_STATUSES
        row: Row = {"machine": machine_of(record), "name": name, "baseline": _baseline(record), "verdict": verdict}
        row |= {"why": _why(record), "stops": is_blocker, "record": record}
        rows.append(row | {"facts": facts_of(record), "source": item.source})
    return tuple(
        sorted(rows, key=lambda row: (_ORDER.index(row["verdict"]) if row["verdict"] in _ORDER else -1, row["name"]))
    )


def _baseline(record: Record) -> str:
    baseline = record.baseline or {}
    base_commit = baseline.get("commit")
    baseline_parts = [str(baseline["kernel"])] if baseline.get("kernel") else []
    if isinstance(base_commit, str) and (not baseline_parts or (record.commit and base_commit != record.commit)):
        baseline_parts.append(f"at {commit_text(base_commit, baseline.get('dirty') is True)}")
    return " ".join(baseline_parts) or str(baseline.get("label") or "an unnamed side")


def _why(record: Record) -> str:
    time_effect, *effect_bounds = (record.metrics.get(name) for name in ("effect", "effect_low", "effect_high"))
    if record.reason or time_effect is None or record.verdict != "SLOWER":
        return record.reason
    bounds_text = " to ".join(percent(ci_bound, signed=True) for ci_bound in effect_bounds if ci_bound is not None)
    return f"its time is {percent(time_effect, signed=True)} against its baseline's, bounds {bounds_text or 'unknown'}"


COMPILED_COLUMNS = (
    "name target findings registers spill_loads spill_stores stack_bytes shared_bytes threads ctas_per_sm occupancy"
    " occupancy_limiter grid launches ctas waves tail_ctas wave_efficiency tensor_path loop_counts"
).split()
"""The columns for a launched GPU kernel, in order."""
BAD_COLUMNS = ("findings", "spill_loads", "spill_stores", "stack_bytes")
"""The values that are marked if present: registers that spill to memory, and options that had no effect."""


def compiled_tables(located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns a table for each op with the newest compiled code of each kernel, case, scheme, config and GPU type.

    A row is one launched GPU kernel.  A column is present if at least one row has a value for it."""
    newest_items = newest(
        (item for item in located if item.record.compiled or item.record.kind == "static"),
        lambda item: (
            *(item.op, item.kernel, item.case_id, item.scheme, str(item.config)),
            item.compiled[0].get("target") if item.compiled else "",
        ),
    )
    tables = []
    for op, items in sorted(grouped(newest_items, lambda item: item.record.op or "no op").items()):
        rows: tuple[Row, ...] = tuple(
            {
                "record": item.record,
                "failed": item.record.status not in FINE_STATUSES,
                "texts": _shown(compiled_launch),
                "predicted": predicted(item.record),
                "source": item.source,
            }
            for item in items
            for compiled_launch in item.record.compiled or ({},)
        )
        columns = tuple(name for name in COMPILED_COLUMNS if any(row["texts"].get(name) for row in rows))
        tables.append({"op": op, "columns": columns, "rows": rows})
    return tuple(tables)


def _shown(launch: Mapping[str, Any]) -> dict[str, str]:
    launch_values = {**launch, "loop_counts": (launch.get("loop") or {}).get("counts")}
    texts = {name: value_text(name, launch_values[name]) for name in COMPILED_COLUMNS if launch_values.get(name)}
    if launch.get("grid"):
        texts["grid"] = "×".join(map(str, launch["grid"]))
    return texts


def engine_tables(located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns tables of engine runs, one row per run. Runs with the same metrics share a table. A repeated run, with
    the same machine, kind, options and kernels, replaces the older run.

    A run with one token per request has no ITL. It is in the same table as runs with an ITL."""
    items = newest(
        (item for item in located if item.record.kind == "engine" and item.record.case_id != CASE_ID),
        lambda entry: (machine_of(entry), entry.case_id, str(entry.case), entry.scheme),
    )
    tables, ops = [], registry.ops()
    for same_metric_items in grouped(items, _metrics).values():
        keys = dict.fromkeys(key for item in same_metric_items for key in item.record.metrics)
        run_kinds = list(dict.fromkeys(item.record.case_id or "engine" for item in same_metric_items))
        table_title = (
            run_kinds[0] if len(run_kinds) == 1 else "Runs of requests" if "ttft_p50_ms" in keys else "Other readings"
        )
        rows = []
        for item in same_metric_items:
            record = item.record
            row = {
                "machine": machine_of(record),
                "record": record,
                "options": plain_value({name: value for name, value in record.case.items() if name not in ops}),
                "kernels": ", ".join(f"{op}={kernel}" for op, kernel in record.case.items() if op in ops),
                "texts": tuple(metric_text(key, record.metrics[key]) if key in record.metrics else "" for key in keys),
                "failed": record.status not in NOT_WRONG_STATUSES,
                "facts": facts_of(record),
                "source": item.source,
            }
            rows.append(row)
        columns = tuple(metric_label(key) for key in keys)
        tables.append({"name": table_title, "columns": columns, "rows": tuple(rows)})
    return tuple(tables)


def _metrics(item: Located) -> frozenset[str]:
    """Returns the names of a run's metrics, except ITL and TPOT. A run with one token per request lacks them."""
    return frozenset(key for key in item.record.metrics if not key.startswith(("itl", "tpot")))
