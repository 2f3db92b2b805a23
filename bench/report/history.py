"""How a kernel's time went from commit to commit, on one machine and one case: only where there are two or more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rooflab.bench.report.newest import benches_of, choose, kernel_key, latency_ms
from rooflab.bench.report.sources import Located, Source
from rooflab.bench.report.words import commit_text

_WIDTH, _HEIGHT, _EDGE = 120.0, 28.0, 3.0


@dataclass(frozen=True)
class Moment:
    """The time at one commit."""

    commit: str
    latency_ms: float
    x: float
    y: float
    source: Source


@dataclass(frozen=True)
class Trend:
    """One kernel on one machine, on the largest case that several commits have in common."""

    machine: str
    op: str
    kernel: str
    case_id: str
    scheme: str
    moments: tuple[Moment, ...]
    change: float
    """Last over first, less one: 0.03 is 3% longer."""


def trends(located: Sequence[Located]) -> tuple[Trend, ...]:
    """One for each machine, kernel and scheme with times at two commits or more."""
    by_case: dict[Hashable, list[Located]] = {}
    for item in benches_of(located):
        if latency_ms(item.record) is not None:
            by_case.setdefault(kernel_key(item.record), []).append(item)
    largest: dict[Hashable, tuple[tuple[float, float], Trend]] = {}
    for items in by_case.values():
        trend = _trend(items)
        if trend is None:
            continue
        size = (items[-1].record.flops or 0.0, items[-1].record.least_bytes or 0.0)
        key = (trend.machine, trend.op, trend.kernel, trend.scheme)
        if key not in largest or size > largest[key][0]:
            largest[key] = (size, trend)
    return tuple(sorted((trend for _, trend in largest.values()), key=lambda one: (one.machine, one.op, one.kernel)))


def _trend(items: Sequence[Located]) -> Trend | None:
    """The newest time of each commit, in the order in which the commits were last measured."""
    groups: dict[str, list[Located]] = {}
    for item in items:
        groups.setdefault(commit_text(item.record.commit, item.record.dirty), []).append(item)
    if len(groups) < 2:
        return None
    last = sorted((choose(group)[0].located for group in groups.values()), key=lambda item: item.time)
    times = [time for item in last if (time := latency_ms(item.record)) is not None]
    low, high = min(times), max(times)
    room = max(high - low, 0.02 * high)  # a change of less than 2% must not look like a cliff
    moments = tuple(
        Moment(
            commit=commit_text(item.record.commit, item.record.dirty),
            latency_ms=time,
            x=_EDGE + (_WIDTH - 2 * _EDGE) * place / (len(times) - 1),
            y=_EDGE + (_HEIGHT - 2 * _EDGE) * (1 - (time - low) / room),
            source=item.source,
        )
        for place, (item, time) in enumerate(zip(last, times, strict=True))
    )
    machine, op, kernel, case_id, scheme = kernel_key(last[-1].record)
    return Trend(machine, op, kernel, case_id, scheme, moments, times[-1] / times[0] - 1)
