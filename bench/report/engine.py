"""Engine runs: TTFT, ITL, throughput, and the kernels that served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooflab.bench.records.record import Record
from rooflab.bench.report.facts import facts_of
from rooflab.bench.report.newest import FINE, machine_of
from rooflab.bench.report.sources import Located, Source
from rooflab.bench.report.words import metric_label, metric_text, plain_value
from rooflab.kernels import registry

_FIRST = ("ttft", "itl", "tpot", "e2e", "tokens_per_s", "requests_per_s")


@dataclass(frozen=True)
class EngineRow:
    """One run."""

    machine: str
    name: str
    options: str
    """What was asked of it: model, dtype, prompts."""
    kernels: str
    """Op and kernel, where the record says them."""
    values: tuple[str, ...]
    status: str
    reason: str
    failed: bool
    facts: tuple[tuple[str, str], ...]
    source: Source


@dataclass(frozen=True)
class EngineTable:
    """Runs of one kind, with the metrics that any of them has."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[EngineRow, ...]


def engine_tables(located: Sequence[Located]) -> tuple[EngineTable, ...]:
    """One table for each set of metrics; of each machine, run, options and kernels the newest."""
    found: dict[tuple[str, ...], Located] = {}
    for item in located:
        if item.record.kind == "engine":
            found[_key(item.record)] = item
    tables = []
    groups: dict[frozenset[str], list[Located]] = {}
    for item in found.values():
        groups.setdefault(_shape(item.record), []).append(item)
    for shape, own in groups.items():
        keys = sorted(dict.fromkeys(key for item in own for key in item.record.metrics), key=_rank)
        name = "Runs of requests" if any("ttft" in key for key in shape) else "Other readings"
        names = dict.fromkeys(item.record.case_id or "engine" for item in own)
        title = next(iter(names)) if len(names) == 1 else name
        tables.append(
            EngineTable(title, tuple(metric_label(key) for key in keys), tuple(_row(item, keys) for item in own))
        )
    return tuple(tables)


def _shape(record: Record) -> frozenset[str]:
    """What it measures; a run of one token a request has no ITL and stands beside the others all the same."""
    return frozenset(key for key in record.metrics if not key.startswith(("itl", "tpot")))


def _key(record: Record) -> tuple[str, ...]:
    return machine_of(record), record.case_id or "", plain_value(record.case), record.scheme or ""


def _rank(key: str) -> int:
    return next((place for place, word in enumerate(_FIRST) if word in key), len(_FIRST))


def _row(item: Located, keys: Sequence[str]) -> EngineRow:
    record = item.record
    ops = registry.ops()
    served = {name: value for name, value in record.case.items() if name in ops}
    options = {name: value for name, value in record.case.items() if name not in ops}
    return EngineRow(
        machine=machine_of(record),
        name=record.case_id or "engine",
        options=plain_value(options) if options else "",
        kernels=", ".join(f"{op}={kernel}" for op, kernel in served.items()),
        values=tuple(metric_text(key, record.metrics[key]) if key in record.metrics else "" for key in keys),
        status=record.status,
        reason=record.reason,
        failed=record.status not in FINE,
        facts=facts_of(record),
        source=item.source,
    )
