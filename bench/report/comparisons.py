"""A/B verdicts, worst first, with the effect and what could have been seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from rooflab.bench.records.record import Record
from rooflab.bench.report.facts import facts_of
from rooflab.bench.report.newest import FINE, machine_of, newest
from rooflab.bench.report.sources import Located, Source
from rooflab.bench.report.words import commit_text

BROKEN_VERDICTS = ("INCORRECT", "FAILED", "INVALID", "MISSING", "SLOWER")
"""What stops a merge; UNRESOLVED does so only under --strict."""
_ORDER = (*BROKEN_VERDICTS, "UNRESOLVED", "FASTER", "SAME")
_WIDTH, _MIDDLE = 140.0, 70.0


@dataclass(frozen=True)
class Interval:
    """Where an effect and its bounds lie in a small drawing, in pixels; None where a bound is beyond its edge."""

    low: float
    effect: float
    high: float
    open_low: bool
    open_high: bool


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
    interval: Interval | None
    facts: tuple[tuple[str, str], ...]
    source: Source


def comparisons_of(located: Sequence[Located]) -> tuple[Comparison, ...]:
    """The newest of each machine, kernel, case, scheme and baseline: what stops a merge first."""
    records = newest((item for item in located if item.record.kind == "ab"), _key)
    widest = max((_reach(item.record) for item in records), default=0.0)
    found = [_comparison(item, max(widest, 0.02)) for item in records]
    return tuple(sorted(found, key=lambda one: (_ORDER.index(one.verdict) if one.verdict in _ORDER else -1, one.name)))


def _key(record: Record) -> tuple[str, ...]:
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


def _reach(record: Record) -> float:
    """How far from nothing its effect and bounds lie, at most 50%: one wild kernel must not flatten the others."""
    values = [record.metrics.get(name) for name in ("effect", "effect_low", "effect_high")]
    return min(0.5, max((abs(value) for value in values if value is not None and isfinite(value)), default=0.0))


def _comparison(item: Located, reach: float) -> Comparison:
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
        interval=_interval(effect, low, high, reach),
        facts=facts_of(record),
        source=item.source,
    )


def _interval(effect: float | None, low: float | None, high: float | None, reach: float) -> Interval | None:
    if effect is None or not isfinite(effect):
        return None
    at = [_MIDDLE + (_MIDDLE - 4) * (value if value is not None else effect) / reach for value in (low, effect, high)]
    kept = [min(_WIDTH - 2, max(2.0, place)) for place in at]
    return Interval(kept[0], kept[1], kept[2], at[0] < 2.0, at[2] > _WIDTH - 2)
