"""Collects the contents of a report as plain data.  The HTML page is made from these data, and `--json` prints them.

The summary comes first: the speed of the best kernels against naive and library kernels, faults, and missing
measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import geometric_mean

from rooflab.bench.base.plain import Row
from rooflab.bench.core import Environment, Record
from rooflab.bench.report import sources, tables
from rooflab.bench.report.facts import commit_text, machines_of, moment
from rooflab.bench.report.figures import Drawing, largest_cases
from rooflab.bench.report.ladders import LadderRow, op_ladders
from rooflab.bench.report.ledgers import ledger_groups
from rooflab.bench.report.rooflines import ceiling_tables, rooflines
from rooflab.bench.report.sources import Located, grouped, machine_of
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


def standings(ops: Iterable[Row]) -> tuple[Row, ...]:
    """Compares the fastest optimized kernels of each op (any kernels if none is optimized) with library and naive.
    Returns one comparison for each machine, op and scheme (dtypes). Times of two machines are never combined.

    `over_library`, `over_naive` and `of_bound` are spans.  `slower_cases` is the number of cases in which the library
    is faster than every optimized kernel.  `kernels` were the fastest in some case, the most frequent first.
    `other_runs` is the number of ratios whose two times come from different runs."""
    rows = []
    for op in ops:
        for op_ladder in op["ladders"]:
            for scheme, case_blocks in grouped(op_ladder.blocks, lambda block: block["scheme"]).items():
                best_rows = []
                for block in case_blocks:
                    timed_rows = [row for row in block["rows"] if row.latency_ms is not None]
                    candidate_rows = [row for row in timed_rows if row.record.role == "optimized"] or timed_rows
                    best_rows += sorted(candidate_rows, key=lambda row: row.latency_ms or 0.0)[:1]
                best_rows = [row for row in best_rows if row.record.role == "optimized"] or best_rows
                if best_rows:
                    rows.append(_standing(op_ladder.machine, op, scheme, best_rows))
    return tuple(rows)


def _standing(machine: str, op: Row, scheme: str, best: Sequence[LadderRow]) -> Row:
    library_ratios = [row.over_library for row in best if row.over_library]
    naive_ratios = [row.over_naive for row in best if row.over_naive]
    return {
        "machine": machine,
        "op": op["op"],
        "scheme": scheme,
        "over_library": span([time_ratio["value"] for time_ratio in library_ratios]),
        "over_naive": span([time_ratio["value"] for time_ratio in naive_ratios]),
        "of_bound": span([row.record.bound_fraction for row in best if row.record.bound_fraction]),
        "slower_cases": sum(time_ratio["value"] < 1 for time_ratio in library_ratios),
        "kernels": tuple(name for name, _ in Counter(row.kernel for row in best).most_common()),
        "other_runs": sum(time_ratio["other_run"] for time_ratio in (*library_ratios, *naive_ratios)),
        "no_library": op["no_library"],
    }


def span(values: Sequence[float]) -> Row | None:
    """Returns the geometric mean, minimum and maximum of positive ratios, one for each case.  None if there is none."""
    if not values:
        return None
    return {"mean": geometric_mean(values), "low": min(values), "high": max(values), "cases": len(values)}


def problems(located: Sequence[Located], current: Sequence[Located], comparisons: Iterable[Row]) -> tuple[Row, ...]:
    """Returns failed results, results whose time is not positive, and A/B verdicts that block a merge.  `where` is the
    case and the scheme of the result.

    A newer record of the same machine, kernel, case and scheme replaces an older result.  `current` has only such
    newest records, and all of them are bench records."""
    found_problems = []
    latest_checks = sources.newest((item for item in located if item.record.kind == "check"), sources.kernel_key)
    other_records = sources.newest(
        (item for item in located if item.record.kind not in ("check", "bench", "ab")),
        # All runs of the engine have one name, and so have all loads; their cases differ.
        lambda record: (record.kind, *sources.kernel_key(record), str(record.config), str(record.case)),
    )
    for item in (*current, *latest_checks, *other_records):
        record, record_fault = item.record, sources.fault(item.record)
        if record_fault:
            name = "/".join(word for word in (record.op, record.kernel) if word) or record.case_id or record.kind
            case_text = " ".join(word for word in (record.case_id if record.op else None, record.scheme) if word)
            found_problems.append((machine_of(record), record.kind, name, case_text, *record_fault, item.source))
    for row in comparisons:
        if row["stops"]:
            case_text = f"{row['record'].case_id} {row['record'].scheme}"
            name = f"{row['name']} against {row['baseline']}"
            found_problems.append((row["machine"], "ab", name, case_text, row["verdict"], row["why"], row["source"]))
    names = ("machine", "kind", "name", "where", "status", "reason", "source")
    return tuple(dict(zip(names, problem, strict=True)) for problem in found_problems)


def unmeasured(current: Sequence[Located], located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns what is not measured: kernels without a time or without a record, and missing kinds of records."""
    unmeasured_gaps = []
    untimed_records = (
        item.record
        for item in current
        if item.record.status in sources.FINE_STATUSES and item.record.latency_median_ms is None
    )
    for (machine, status, reason), records in grouped(untimed_records, _untimed).items():
        names = [f"{record.op}/{record.kernel}" for record in records]
        unmeasured_gaps.append(_gap(machine, status, reason, names))
    registered_ids = [kernel.id for kernel in registry.every_kernel()]
    for machine, machine_items in grouped(current, lambda item: machine_of(item.record)).items():
        recorded_names = {f"{item.record.op}/{item.record.kernel}" for item in machine_items}
        if absent_kernels := [name for name in registered_ids if name not in recorded_names]:
            reason_text = "registered, and in no bench record of this machine"
            unmeasured_gaps.append(_gap(machine, "NO RECORD", reason_text, absent_kernels))
    kinds_on_record = {item.record.kind for item in located}
    if missing_kinds := [KIND_NAMES[kind] for kind in KIND_NAMES if kind not in kinds_on_record]:
        unmeasured_gaps.append(_gap("any machine", "NO RECORD", "no record of these kinds was read", missing_kinds))
    return tuple(unmeasured_gaps)


def _gap(machine: str, status: str, reason: str, names: Sequence[str]) -> Row:
    distinct_names = tuple(dict.fromkeys(names))
    return {"machine": machine, "status": status, "reason": reason, "names": distinct_names, "count": len(names)}


def _untimed(record: Record) -> tuple[str, str, str]:
    status = "NOT TIMED" if record.status == "OK" else record.status
    return machine_of(record), status, record.reason or "the record holds no time"


def tallies(located: Sequence[Located]) -> tuple[Row, ...]:
    """Counts the records for each kind and status."""
    status_counts = []
    for kind, name in KIND_NAMES.items():
        statuses = Counter(item.record.status for item in located if item.record.kind == kind)
        if statuses:
            status_counts.append({"kind": name, "total": statuses.total(), "statuses": tuple(statuses.most_common())})
    return tuple(status_counts)


def trends(located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns how the time of each op's largest case changed over at least two commits, for each machine."""
    machines = grouped((item.record for item in located), machine_of).values()
    largest_ids = {id(record) for records in machines for record in largest_cases(records)}
    trend_items = [item for item in located if id(item.record) in largest_ids and not why_not(item.record)]
    all_trends = find_trends(points_of((item.record, item.source) for item in trend_items), {})
    long_trends = [
        trend for trend in all_trends if len({(x.record.commit, bool(x.record.dirty)) for x in trend.points}) > 1
    ]
    return tuple({**trend.row(), "source": trend.points[-1].file} for trend in long_trends)


@dataclass(frozen=True)
class Content:
    """Holds the content of a report.  It depends only on the records, not on the time when the report is made."""

    title: str
    version: str
    first: str
    last: str
    records: int
    runs: int
    replaced_failures: int
    """The number of failed or noisy bench records that a newer record of the kernel, case and machine replaced."""
    standings: tuple[Row, ...]
    problems: tuple[Row, ...]
    noisy: tuple[Row, ...]
    """Readings that spread or drift, or of a busy machine.  Failed, impossible or slower results are in `problems`."""
    unmeasured: tuple[Row, ...]
    tallies: tuple[Row, ...]
    commits: tuple[tuple[str, int], ...]
    """The commits with the number of their records, the oldest record first.  Dirty and clean trees are separate."""
    machines: tuple[Row, ...]
    rooflines: tuple[Drawing, ...]
    ops: tuple[Row, ...]
    comparisons: tuple[Row, ...]
    compiled: tuple[Row, ...]
    ceilings: tuple[Row, ...]
    engine: tuple[Row, ...]
    ledgers: tuple[Row, ...]
    trends: tuple[Row, ...]
    """Rows of the trends with at least two commits, as `rooflab history` shows them.  `source` in a row is the source
    of the newest point (`sources.newest`)."""
    files: tuple[Row, ...]


def gather(located: Sequence[Located], files: Sequence[Row], title: str) -> Content:
    """Makes the content of a report from records.  `located` has the records with their files, oldest first."""
    benches = sources.benches_of(located)
    chosen_benches = sources.choose(benches)
    ops, comparisons = op_ladders(located), tables.comparisons_of(located)
    found_problems = problems(located, chosen_benches, comparisons)
    num_failed = sum(sources.fault(item.record) is not None for item in benches)
    return Content(
        title=title,
        version=_version(),
        first=moment(located[0].record.timestamp),
        last=moment(located[-1].record.timestamp),
        records=len(located),
        runs=len({item.record.run_id for item in located}),
        replaced_failures=num_failed - sum(sources.fault(item.record) is not None for item in chosen_benches),
        standings=standings(ops),
        problems=tuple(entry for entry in found_problems if entry["status"] != "NOISY"),
        noisy=tuple(entry for entry in found_problems if entry["status"] == "NOISY"),
        unmeasured=unmeasured(chosen_benches, located),
        tallies=tallies(located),
        commits=tuple(Counter(commit_text(entry.record.commit, entry.record.dirty) for entry in located).items()),
        machines=machines_of(located),
        rooflines=rooflines(located, chosen_benches),
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
    """Returns Rooflab's installed version, or a text with the hash of the source files if it is not installed."""
    try:
        return version("rooflab")
    except PackageNotFoundError:
        return f"from a checkout, tree {Environment.tree()}"
