"""The first page: how the optimized kernels stand against the library, what failed, and what nobody has measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import get_args

from rooflab.bench.records.record import Kind
from rooflab.bench.report.comparisons import BROKEN_VERDICTS, Comparison
from rooflab.bench.report.ladders import Block, OpLadder, Row
from rooflab.bench.report.newest import NOT_RUN, fault, kernel_key, machine_of, newest
from rooflab.bench.report.sources import Located, Source
from rooflab.bench.report.words import commit_text, percent
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
    """A ratio over cases: geometric mean, least and largest."""

    mean: float
    low: float
    high: float
    cases: int


@dataclass(frozen=True)
class Standing:
    """The fastest optimized kernel of each case of an op, against the library and against naive."""

    machine: str
    op: str
    scheme: str
    over_library: Span | None
    over_naive: Span | None
    of_bound: Span | None
    slower_cases: int
    """Cases in which the library is faster than every optimized kernel."""
    kernels: tuple[str, ...]
    """The optimized kernels that were the fastest of some case, the most frequent first."""
    other_runs: int
    """Ratios whose two times come from different runs."""
    no_library: str


@dataclass(frozen=True)
class Problem:
    """A result that must not be overlooked."""

    machine: str
    kind: str
    name: str
    where: str
    """Case and scheme."""
    status: str
    reason: str
    source: Source


@dataclass(frozen=True)
class Gap:
    """What was not measured, and why."""

    machine: str
    status: str
    reason: str
    names: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Tally:
    """How many records of a kind have each status."""

    kind: str
    total: int
    statuses: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class CommitInfo:
    """One state of the source that records were made from."""

    text: str
    dirty: bool
    records: int


def standings(ops: Iterable[OpLadder]) -> tuple[Standing, ...]:
    """One for each machine, op and scheme that has an optimized time; never of two machines together."""
    found = []
    for op in ops:
        for ladder in op.ladders:
            for scheme in dict.fromkeys(block.scheme for block in ladder.blocks):
                blocks = [block for block in ladder.blocks if block.scheme == scheme]
                best = [row for block in blocks if (row := _fastest(block)) is not None]
                if best:
                    found.append(_standing(ladder.machine, op, scheme, best))
    return tuple(found)


def _fastest(block: Block) -> Row | None:
    timed = [(row.latency_ms, row) for row in block.rows if row.role == "optimized" and row.latency_ms is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _standing(machine: str, op: OpLadder, scheme: str, best: Sequence[Row]) -> Standing:
    over_library = [row.over_library for row in best if row.over_library]
    over_naive = [row.over_naive for row in best if row.over_naive]
    return Standing(
        machine=machine,
        op=op.op,
        scheme=scheme,
        over_library=span([ratio.value for ratio in over_library]),
        over_naive=span([ratio.value for ratio in over_naive]),
        of_bound=span([row.bound_fraction for row in best if row.bound_fraction]),
        slower_cases=sum(ratio.value < 1 for ratio in over_library),
        kernels=tuple(name for name, _ in Counter(row.kernel for row in best).most_common()),
        other_runs=sum(ratio.other_run for ratio in (*over_library, *over_naive)),
        no_library=op.no_library,
    )


def span(values: Sequence[float]) -> Span | None:
    """Geometric mean, least and largest of positive ratios; None of none."""
    if not values:
        return None
    return Span(exp(sum(log(value) for value in values) / len(values)), min(values), max(values), len(values))


def problems(
    located: Sequence[Located], current: Sequence[Located], comparisons: Iterable[Comparison]
) -> tuple[Problem, ...]:
    """Failed and impossible results that no newer record of the same key has replaced, and verdicts that stop a merge.

    `current` are the bench records that speak for now.
    """
    found = []
    checks = newest((item for item in located if item.record.kind == "check"), kernel_key)
    others = newest(
        (item for item in located if item.record.kind not in ("check", "bench", "ab")),
        lambda record: (record.kind, *kernel_key(record), str(record.config)),
    )
    for item in (*current, *checks, *others):
        wrong = fault(item.record)
        if wrong:
            found.append(_problem(item, *wrong))
    for comparison in comparisons:
        if comparison.verdict in ("", *BROKEN_VERDICTS) or comparison.failed:
            name = f"{comparison.name} against {comparison.baseline}"
            where = f"{comparison.case_id} {comparison.scheme}"
            status = comparison.verdict or (comparison.status if comparison.failed else "NO VERDICT")
            found.append(Problem(comparison.machine, "ab", name, where, status, _slower(comparison), comparison.source))
    return tuple(found)


def _slower(comparison: Comparison) -> str:
    """The reason that the record gives, or the effect, which is the reason of a verdict that has no other."""
    if comparison.why or comparison.effect is None:
        return comparison.why
    bounds = [percent(bound, signed=True) for bound in (comparison.low, comparison.high) if bound is not None]
    between = f", bounds {' to '.join(bounds)}" if bounds else ""
    return f"its time is {percent(comparison.effect, signed=True)} against its baseline's{between}"


def _problem(item: Located, status: str, reason: str) -> Problem:
    record = item.record
    name = "/".join(part for part in (record.op, record.kernel) if part) or record.case_id or record.kind
    where = " ".join(part for part in (record.case_id if record.op else None, record.scheme) if part)
    return Problem(machine_of(record), record.kind, name, where, status, reason, item.source)


def unmeasured(current: Sequence[Located], located: Sequence[Located]) -> tuple[Gap, ...]:
    """Kernels without a time by machine and reason, kernels of the registry in no record, and kinds with none."""
    groups: dict[tuple[str, str, str], list[Located]] = {}
    for item in current:
        record = item.record
        if record.status in NOT_RUN or (record.status == "OK" and record.latency_median_ms is None):
            status = record.status if record.status in NOT_RUN else "NOT TIMED"
            key = (machine_of(record), status, record.reason or "the record holds no time")
            groups.setdefault(key, []).append(item)
    gaps = [
        Gap(
            machine, status, reason, tuple(dict.fromkeys(f"{i.record.op}/{i.record.kernel}" for i in items)), len(items)
        )
        for (machine, status, reason), items in groups.items()
    ]
    for machine in dict.fromkeys(machine_of(item.record) for item in current):
        there = {(item.record.op, item.record.kernel) for item in current if machine_of(item.record) == machine}
        absent = tuple(
            kernel.id
            for op in registry.ops()
            for kernel in registry.kernels(op).values()
            if (op, kernel.name) not in there
        )
        if absent:
            gaps.append(
                Gap(machine, "NO RECORD", "registered, and in no bench record of this machine", absent, len(absent))
            )
    kinds = {item.record.kind for item in located}
    gone = tuple(KIND_NAMES[kind] for kind in get_args(Kind) if kind not in kinds)
    if gone:
        gaps.append(Gap("any machine", "NO RECORD", "no record of these kinds was read", gone, len(gone)))
    return tuple(gaps)


def tallies(located: Sequence[Located]) -> tuple[Tally, ...]:
    """Records by kind and status."""
    found = []
    for kind in get_args(Kind):
        statuses = Counter(item.record.status for item in located if item.record.kind == kind)
        if statuses:
            found.append(Tally(KIND_NAMES[kind], statuses.total(), tuple(statuses.most_common())))
    return tuple(found)


def commits(located: Sequence[Located]) -> tuple[CommitInfo, ...]:
    """Every commit, oldest record first, a dirty tree apart from a clean one."""
    counts = Counter((item.record.commit, bool(item.record.dirty)) for item in located)
    return tuple(CommitInfo(commit_text(commit, dirty), dirty, count) for (commit, dirty), count in counts.items())
