"""All that a report says, as plain data: the page is drawn from it, and `--json` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rooflab.bench.records.source_tree import tree_hash
from rooflab.bench.report.ceilings import CeilingTable, ceiling_tables
from rooflab.bench.report.comparisons import Comparison, comparisons_of
from rooflab.bench.report.compiled import CompiledTable, compiled_tables
from rooflab.bench.report.engine import EngineTable, engine_tables
from rooflab.bench.report.history import Trend, trends
from rooflab.bench.report.ladders import OpLadder, op_ladders
from rooflab.bench.report.machines import Machine, machines_of
from rooflab.bench.report.newest import benches_of, choose, fault
from rooflab.bench.report.places import Roofline, rooflines
from rooflab.bench.report.sources import FileInfo, Located
from rooflab.bench.report.summary import (
    CommitInfo,
    Gap,
    Problem,
    Standing,
    Tally,
    commits,
    problems,
    standings,
    tallies,
    unmeasured,
)
from rooflab.bench.report.words import moment


@dataclass(frozen=True)
class Content:
    """The report.  The same records give the same content: nothing in it is of the moment at which it was made."""

    title: str
    version: str
    first: str
    last: str
    records: int
    runs: int
    replaced_failures: int
    """Failed bench records that a newer record of the same kernel, case and machine has replaced."""
    standings: tuple[Standing, ...]
    problems: tuple[Problem, ...]
    unmeasured: tuple[Gap, ...]
    tallies: tuple[Tally, ...]
    commits: tuple[CommitInfo, ...]
    machines: tuple[Machine, ...]
    rooflines: tuple[Roofline, ...]
    ops: tuple[OpLadder, ...]
    comparisons: tuple[Comparison, ...]
    compiled: tuple[CompiledTable, ...]
    ceilings: tuple[CeilingTable, ...]
    engine: tuple[EngineTable, ...]
    trends: tuple[Trend, ...]
    files: tuple[FileInfo, ...]


def gather(located: Sequence[Located], files: Sequence[FileInfo], title: str) -> Content:
    """The content of a report over `located`, oldest first."""
    benches = benches_of(located)
    chosen = choose(benches)
    current = [item.located for item in chosen]
    ops, comparisons = op_ladders(located), comparisons_of(located)
    failed = sum(fault(item.record) is not None for item in benches)
    return Content(
        title=title,
        version=_version(),
        first=moment(located[0].record.timestamp),
        last=moment(located[-1].record.timestamp),
        records=len(located),
        runs=len({item.record.run_id for item in located}),
        replaced_failures=failed - sum(fault(item.record) is not None for item in current),
        standings=standings(ops),
        problems=problems(located, current, comparisons),
        unmeasured=unmeasured(current, located),
        tallies=tallies(located),
        commits=commits(located),
        machines=machines_of(located),
        rooflines=rooflines(located, chosen, ops),
        ops=ops,
        comparisons=comparisons,
        compiled=compiled_tables(located),
        ceilings=ceiling_tables(located),
        engine=engine_tables(located),
        trends=trends(located),
        files=tuple(files),
    )


def _version() -> str:
    """The installed version; of a bare checkout, which has none, the hash of its files."""
    try:
        return version("rooflab")
    except PackageNotFoundError:
        return f"from a checkout, tree {tree_hash()}"
