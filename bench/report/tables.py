"""Three tables of a report: A/B verdicts, compiled code, and runs of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.bench.records.record import Record
from rooflab.bench.report.facts import facts_of
from rooflab.bench.report.sources import FINE, Located, Source, machine_of, newest
from rooflab.bench.report.words import commit_text, digits, metric_label, metric_text, plain_value
from rooflab.kernels import registry

BROKEN_VERDICTS = ("INCORRECT", "FAILED", "INVALID", "MISSING", "SLOWER")
"""What stops a merge; UNRESOLVED does so only under --strict."""
_ORDER = (*BROKEN_VERDICTS, "UNRESOLVED", "FASTER", "SAME")


@dataclass(frozen=True)
class Comparison:
    """Side B, which the record is of, against side A, its baseline.  Effects are ratios minus one: 0.03 is 3% more."""

    machine: str
    name: str
    baseline: str
    case_id: str
    scheme: str
    status: str
    verdict: str
    why: str
    failed: bool
    a_ms: float | None
    b_ms: float | None
    effect: float | None
    low: float | None
    high: float | None
    smallest: float | None
    """Smallest effect that these pairs could have seen."""
    pairs: float | None
    pairs_for_1_percent: float | None
    p_value: float | None
    noise_floor: float | None
    facts: tuple[tuple[str, str], ...]
    source: Source


def comparisons_of(located: Sequence[Located]) -> tuple[Comparison, ...]:
    """The newest of each machine, kernel, case, scheme and baseline: what stops a merge first."""
    records = newest((item for item in located if item.record.kind == "ab"), _comparison_key)
    found = [_comparison(item) for item in records]
    return tuple(sorted(found, key=lambda one: (_ORDER.index(one.verdict) if one.verdict in _ORDER else -1, one.name)))


def _comparison_key(record: Record) -> tuple[str, ...]:
    texts = (record.op, record.kernel, record.case_id, record.scheme)
    return (machine_of(record), *(text or "" for text in texts), _baseline(record))


def _baseline(record: Record) -> str:
    side = record.baseline or {}
    commit = side.get("commit")
    own = record.commit and commit != record.commit
    parts = [str(side["kernel"])] if side.get("kernel") else []
    if isinstance(commit, str) and (own or not parts):
        parts.append(f"at {commit_text(commit, side.get('dirty') is True)}")
    return " ".join(parts) or str(side.get("label") or "an unnamed side")


def _comparison(item: Located) -> Comparison:
    record, metrics = item.record, item.record.metrics
    a_ms = (record.baseline or {}).get("latency_median_ms")
    effect, low, high = (metrics.get(name) for name in ("effect", "effect_low", "effect_high"))
    return Comparison(
        machine=machine_of(record),
        name=f"{record.op}/{record.kernel}" if record.op else record.kernel or "own function",
        baseline=_baseline(record),
        case_id=record.case_id or "",
        scheme=record.scheme or "",
        status=record.status,
        verdict=record.verdict or "",
        why=record.reason,
        failed=record.status not in FINE,
        a_ms=float(a_ms) if isinstance(a_ms, int | float) else None,
        b_ms=record.latency_median_ms,
        effect=effect,
        low=low,
        high=high,
        smallest=metrics.get("smallest_visible_effect"),
        pairs=metrics.get("pairs"),
        pairs_for_1_percent=metrics.get("pairs_for_1_percent"),
        p_value=metrics.get("p_value"),
        noise_floor=metrics.get("noise_floor"),
        facts=facts_of(record),
        source=item.source,
    )


_COMPILED_FIRST = (
    *("name", "target", "findings", "registers", "spill", "stack", "shared", "threads", "num_warps", "num_stages"),
    *("ctas_per_sm", "occupancy", "limiter", "grid", "ctas", "waves", "full_waves", "tail_ctas", "wave", "tail"),
    *("tensor_path", "wgmma", "mma", "tma", "cp_async", "ldmatrix", "loop", "counts", "load", "store"),
    *("warp_special", "tf32", "options", "asked", "launches", "device"),
)
"""The columns' order: a key comes at its own place, else at the first word that it holds; an unknown one comes last."""
_BAD_WORDS = ("spill", "stack", "findings")
_LONGEST, _MOST = 240, 12


@dataclass(frozen=True)
class Cell:
    """One value, and whether it is one to look at: registers spilled to memory."""

    text: str
    warn: bool = False
    number: bool = False


@dataclass(frozen=True)
class CompiledRow:
    """One launched kernel of one kernel of an op."""

    kernel: str
    case_id: str
    scheme: str
    config: str
    status: str
    reason: str
    failed: bool
    cells: tuple[Cell, ...]
    predicted: str
    source: Source


@dataclass(frozen=True)
class CompiledTable:
    """The rows of one op, with the columns that any of them has."""

    op: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    """Whether a column holds numbers."""
    rows: tuple[CompiledRow, ...]


def compiled_tables(located: Sequence[Located]) -> tuple[CompiledTable, ...]:
    """One table an op, from the newest record with compiled code of each kernel, case, scheme, config and target."""
    holding = [item for item in located if item.record.compiled or item.record.kind == "static"]
    current = newest(holding, _compiled_key)
    tables = []
    for op in sorted({item.record.op or "no op" for item in current}):
        own = [item for item in current if (item.record.op or "no op") == op]
        flat = [(item, dict(flatten(launched))) for item in own for launched in item.record.compiled or ({},)]
        keys = sorted(dict.fromkeys(key for _, values in flat for key in values), key=_compiled_rank)
        rows = tuple(_compiled_row(item, values, keys) for item, values in flat)
        numeric = tuple(any(row.cells[place].number for row in rows) for place in range(len(keys)))
        tables.append(CompiledTable(op, tuple(key.replace("_", " ") for key in keys), numeric, rows))
    return tuple(tables)


def _compiled_key(record: Record) -> tuple[str, ...]:
    target = str(record.compiled[0].get("target")) if record.compiled else ""
    return (record.op or "", record.kernel or "", record.case_id or "", record.scheme or "", str(record.config), target)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values; an object of numbers, such as counts of instructions, is one value, another is opened."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not all(isinstance(item, int | float) for item in value.values()):
            yield from flatten(value, f"{name} ")
        else:
            yield name, value


def _compiled_rank(key: str) -> tuple[int, int]:
    if key in _COMPILED_FIRST:
        return 0, _COMPILED_FIRST.index(key)
    held = [place for place, word in enumerate(_COMPILED_FIRST) if word in key]
    return (0, held[0]) if held else (1, 0)


def _compiled_row(item: Located, values: Mapping[str, Any], keys: Sequence[str]) -> CompiledRow:
    record = item.record
    predicted = ""
    if record.predicted_ms is not None:
        error = record.prediction_error
        predicted = f"{digits(record.predicted_ms * 1e3, 4)} µs, " + (
            "uncalibrated" if error is None else f"held-out error {100 * error:.0f}%"
        )
    return CompiledRow(
        kernel=record.kernel or "no kernel",
        case_id=record.case_id or "",
        scheme=record.scheme or "",
        config=plain_value(record.config) if record.config else "",
        status=record.status,
        reason=record.reason,
        failed=record.status not in FINE,
        cells=tuple(_cell(key, values.get(key)) for key in keys),
        predicted=predicted,
        source=item.source,
    )


def _cell(key: str, value: Any) -> Cell:
    if value is None:
        return Cell("")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, list | tuple) and value and all(isinstance(size, int) for size in value):
        return Cell("×".join(map(str, value)), number=True)
    bad = any(word in key for word in _BAD_WORDS)
    return Cell(_cell_text(value), bad and (value > 0 if number else bool(value)), number)


def _cell_text(value: Any) -> str:
    """A value in one line that a table has room for."""
    if isinstance(value, Mapping):
        shown = plain_value(dict(list(value.items())[:_MOST]))
        return f"{shown} and {len(value) - _MOST} more" if len(value) > _MOST else shown
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return "; ".join(_option(item) if isinstance(item, Mapping) else plain_value(item) for item in value)
    text = plain_value(value)
    if len(text) == 64 and all(letter in "0123456789abcdef" for letter in text):
        return text[:12]
    return text if len(text) <= _LONGEST else f"{len(text):,} characters"


def _option(option: Mapping[str, Any]) -> str:
    """What was asked of the compiler, by name where it has one, and whether it took no effect."""
    if "name" not in option:
        return plain_value(option)
    return f"{option['name']}{': no effect' if option.get('took_effect') is False else ''}"


_ENGINE_FIRST = ("ttft", "itl", "tpot", "e2e", "tokens_per_s", "requests_per_s")


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
            found[_engine_key(item.record)] = item
    tables = []
    groups: dict[frozenset[str], list[Located]] = {}
    for item in found.values():
        groups.setdefault(_shape(item.record), []).append(item)
    for shape, own in groups.items():
        keys = sorted(dict.fromkeys(key for item in own for key in item.record.metrics), key=_engine_rank)
        name = "Runs of requests" if any("ttft" in key for key in shape) else "Other readings"
        names = dict.fromkeys(item.record.case_id or "engine" for item in own)
        title = next(iter(names)) if len(names) == 1 else name
        tables.append(
            EngineTable(title, tuple(metric_label(key) for key in keys), tuple(_engine_row(item, keys) for item in own))
        )
    return tuple(tables)


def _shape(record: Record) -> frozenset[str]:
    """What it measures; a run of one token a request has no ITL and stands beside the others all the same."""
    return frozenset(key for key in record.metrics if not key.startswith(("itl", "tpot")))


def _engine_key(record: Record) -> tuple[str, ...]:
    return machine_of(record), record.case_id or "", plain_value(record.case), record.scheme or ""


def _engine_rank(key: str) -> int:
    return next((place for place, word in enumerate(_ENGINE_FIRST) if word in key), len(_ENGINE_FIRST))


def _engine_row(item: Located, keys: Sequence[str]) -> EngineRow:
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
