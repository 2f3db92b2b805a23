"""All contents of a report as plain data.  The page is drawn from these data, and `--json` prints them.

The summary comes first: the best kernels against naive and the library, faults, and missing measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import geometric_mean
from typing import Any

from rooflab.bench.core import Environment, Record
from rooflab.bench.report import sources, tables
from rooflab.bench.report.facts import Machine, commit_text, machines_of, moment
from rooflab.bench.report.figures import Drawing, largest_cases
from rooflab.bench.report.ladders import LadderRow, OpLadder, op_ladders
from rooflab.bench.report.ledgers import LedgerGroup, ledger_groups
from rooflab.bench.report.rooflines import CeilingTable, ceiling_tables, rooflines
from rooflab.bench.report.sources import Located, Source, grouped, machine_of
from rooflab.bench.report.trends.points import points_of, why_not
from rooflab.bench.report.trends.trend import find_trends
from rooflab.kernels import registry

KIND_NAMES = {
    "check": "checks",
    "bench": "times of kernels",
    "ceiling": "measured ceilings",
    "engine": "engine runs",
    "ab": "A/B verdicts",
    "static": "compiled code",
}


@dataclass(frozen=True)
class Span:
    """The ratios of several cases: their geometric mean, the smallest ratio and the largest ratio."""

    mean: float
    low: float
    high: float
    cases: int


@dataclass(frozen=True)
class Standing:
    """The speed of an op's fastest optimized kernels (or, without any, fastest kernels) against library and naive."""

    machine: str
    op: str
    scheme: str
    over_library: Span | None
    over_naive: Span | None
    of_bound: Span | None
    slower_cases: int
    """The number of cases in which the library is faster than every optimized kernel."""
    kernels: tuple[str, ...]
    """The kernels that were the fastest in some case, the most frequent first."""
    other_runs: int
    """The number of ratios whose two times come from different runs."""
    no_library: str


@dataclass(frozen=True)
class Problem:
    """A result that the reader must not overlook."""

    machine: str
    kind: str
    name: str
    where: str
    """The case and scheme of the result."""
    status: str
    reason: str
    source: Source


@dataclass(frozen=True)
class Gap:
    """Something that was not measured, and the reason."""

    machine: str
    status: str
    reason: str
    names: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class StatusCount:
    """The number of records of one kind, for each status."""

    kind: str
    total: int
    statuses: tuple[tuple[str, int], ...]


def standings(ops: Iterable[OpLadder]) -> tuple[Standing, ...]:
    """Returns one standing for each machine, op and scheme that has a time.  Machines are never combined."""
    rows = []
    for op in ops:
        for ladder in op.ladders:
            for scheme, blocks in grouped(ladder.blocks, lambda block: block.scheme).items():
                best = []
                for block in blocks:
                    timed = [row for row in block.rows if row.latency_ms is not None]
                    candidates = [row for row in timed if row.record.role == "optimized"] or timed
                    best += sorted(candidates, key=lambda row: row.latency_ms or 0.0)[:1]
                best = [row for row in best if row.record.role == "optimized"] or best
                if best:
                    rows.append(_standing(ladder.machine, op, scheme, best))
    return tuple(rows)


def _standing(machine: str, op: OpLadder, scheme: str, best: Sequence[LadderRow]) -> Standing:
    over_library = [row.over_library for row in best if row.over_library]
    over_naive = [row.over_naive for row in best if row.over_naive]
    return Standing(
        machine=machine,
        op=op.op,
        scheme=scheme,
        over_library=span([ratio.value for ratio in over_library]),
        over_naive=span([ratio.value for ratio in over_naive]),
        of_bound=span([row.record.bound_fraction for row in best if row.record.bound_fraction]),
        slower_cases=sum(ratio.value < 1 for ratio in over_library),
        kernels=tuple(name for name, _ in Counter(row.kernel for row in best).most_common()),
        other_runs=sum(ratio.other_run for ratio in (*over_library, *over_naive)),
        no_library=op.no_library,
    )


def span(values: Sequence[float]) -> Span | None:
    """The geometric mean, the smallest and the largest of positive ratios.  Returns None if there are no values."""
    if not values:
        return None
    return Span(geometric_mean(values), min(values), max(values), len(values))


def problems(
    located: Sequence[Located], current: Sequence[Located], comparisons: Iterable[tables.ComparisonRow]
) -> tuple[Problem, ...]:
    """Failed and impossible results that no newer record of the same key has replaced, and verdicts that stop a merge.

    `current` are the newest bench records, one for each key (`sources.newest`).
    """
    faults = []
    checks = sources.newest((item for item in located if item.record.kind == "check"), sources.kernel_key)
    others = sources.newest(
        (item for item in located if item.record.kind not in ("check", "bench", "ab")),
        # All runs of the engine have one name, and so have all loads; their cases differ.
        lambda record: (record.kind, *sources.kernel_key(record), str(record.config), str(record.case)),
    )
    for item in (*current, *checks, *others):
        record, wrong = item.record, sources.fault(item.record)
        if wrong:
            name = "/".join(part for part in (record.op, record.kernel) if part) or record.case_id or record.kind
            where = " ".join(part for part in (record.case_id if record.op else None, record.scheme) if part)
            faults.append(Problem(machine_of(record), record.kind, name, where, *wrong, item.source))
    for row in comparisons:
        if row.stops:
            where = f"{row.record.case_id} {row.record.scheme}"
            name = f"{row.name} against {row.baseline}"
            faults.append(Problem(row.machine, "ab", name, where, row.verdict, row.why, row.source))
    return tuple(faults)


def unmeasured(current: Sequence[Located], located: Sequence[Located]) -> tuple[Gap, ...]:
    """What was not measured: kernels without a time, by machine and reason, and kernels and kinds without a record."""
    gaps = []
    untimed = (
        item.record for item in current if item.record.status in sources.FINE and item.record.latency_median_ms is None
    )
    for (machine, status, reason), records in grouped(untimed, _gap).items():
        names = [f"{record.op}/{record.kernel}" for record in records]
        gaps.append(Gap(machine, status, reason, tuple(dict.fromkeys(names)), len(names)))
    registered = [kernel.id for kernel in registry.every_kernel()]
    for machine, items in grouped(current, lambda item: machine_of(item.record)).items():
        there = {f"{item.record.op}/{item.record.kernel}" for item in items}
        if absent := tuple(name for name in registered if name not in there):
            why = "registered, and in no bench record of this machine"
            gaps.append(Gap(machine, "NO RECORD", why, absent, len(absent)))
    kinds = {item.record.kind for item in located}
    gone = tuple(KIND_NAMES[kind] for kind in KIND_NAMES if kind not in kinds)
    if gone:
        gaps.append(Gap("any machine", "NO RECORD", "no record of these kinds was read", gone, len(gone)))
    return tuple(gaps)


def _gap(record: Record) -> tuple[str, str, str]:
    status = "NOT TIMED" if record.status == "OK" else record.status
    return machine_of(record), status, record.reason or "the record holds no time"


def tallies(located: Sequence[Located]) -> tuple[StatusCount, ...]:
    """The numbers of records, by kind and status."""
    counts = []
    for kind, name in KIND_NAMES.items():
        statuses = Counter(item.record.status for item in located if item.record.kind == kind)
        if statuses:
            counts.append(StatusCount(name, statuses.total(), tuple(statuses.most_common())))
    return tuple(counts)


def trends(located: Sequence[Located]) -> tuple[Mapping[str, Any], ...]:
    """The trends, in order of time, of each op's largest case on each machine, if two or more commits have times."""
    machines = grouped((item.record for item in located), machine_of).values()
    largest = {id(record) for records in machines for record in largest_cases(records)}
    chosen = [item for item in located if id(item.record) in largest and not why_not(item.record)]
    every = find_trends(points_of((item.record, item.source) for item in chosen), {})
    several = [trend for trend in every if len({(x.record.commit, bool(x.record.dirty)) for x in trend.points}) > 1]
    return tuple({**trend.row(), "source": trend.points[-1].file} for trend in several)


@dataclass(frozen=True)
class Content:
    """The content of a report.  It depends only on the records, not on the time when the report is made."""

    title: str
    version: str
    first: str
    last: str
    records: int
    runs: int
    replaced_failures: int
    """The number of failed or noisy bench records that a newer record of the kernel, case and machine replaced."""
    standings: tuple[Standing, ...]
    problems: tuple[Problem, ...]
    noisy: tuple[Problem, ...]
    """Readings that spread or drift, or of a busy machine.  Failed, impossible or slower results are in `problems`."""
    unmeasured: tuple[Gap, ...]
    tallies: tuple[StatusCount, ...]
    commits: tuple[tuple[str, int], ...]
    """The commits with the number of their records, the oldest record first.  Dirty and clean trees are separate."""
    machines: tuple[Machine, ...]
    rooflines: tuple[Drawing, ...]
    ops: tuple[OpLadder, ...]
    comparisons: tuple[tables.ComparisonRow, ...]
    compiled: tuple[tables.CompiledTable, ...]
    ceilings: tuple[CeilingTable, ...]
    engine: tuple[tables.EngineTable, ...]
    ledgers: tuple[LedgerGroup, ...]
    trends: tuple[Mapping[str, Any], ...]
    """Rows of the trends with at least two commits, as `rooflab history` shows them.  `source` in a row is the source
    of the newest point (`sources.newest`)."""
    files: tuple[sources.FileInfo, ...]


def gather(located: Sequence[Located], files: Sequence[sources.FileInfo], title: str) -> Content:
    """Makes the content of a report over the records `located`, the oldest first."""
    benches = sources.benches_of(located)
    chosen = sources.choose(benches)
    ops, comparisons = op_ladders(located), tables.comparisons_of(located)
    faults = problems(located, chosen, comparisons)
    failed = sum(sources.fault(item.record) is not None for item in benches)
    return Content(
        title=title,
        version=_version(),
        first=moment(located[0].record.timestamp),
        last=moment(located[-1].record.timestamp),
        records=len(located),
        runs=len({item.record.run_id for item in located}),
        replaced_failures=failed - sum(sources.fault(item.record) is not None for item in chosen),
        standings=standings(ops),
        problems=tuple(entry for entry in faults if entry.status != "NOISY"),
        noisy=tuple(entry for entry in faults if entry.status == "NOISY"),
        unmeasured=unmeasured(chosen, located),
        tallies=tallies(located),
        commits=tuple(Counter(commit_text(entry.record.commit, entry.record.dirty) for entry in located).items()),
        machines=machines_of(located),
        rooflines=rooflines(located, chosen),
        ops=ops,
        comparisons=comparisons,
        compiled=tables.compiled_tables(located),
        ceilings=ceiling_tables(located),
        engine=tables.engine_tables(located),
        ledgers=ledger_groups(located),
        trends=trends(located),
        files=tuple(files),
    )


def _version() -> str:
    """The installed version.  A bare checkout has no version, so the result is then the hash of its files."""
    try:
        return version("rooflab")
    except PackageNotFoundError:
        return f"from a checkout, tree {Environment.tree()}"
