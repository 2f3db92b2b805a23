"""Compares the kernels of each op in a table: first naive, then library, then the kernels in the op's own order."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import get_args

from rooflab.bench.base.plain import Row
from rooflab.bench.core import NOT_RUN, Record
from rooflab.bench.report.facts import Facts, facts_of
from rooflab.bench.report.sources import (
    NOT_WRONG_STATUSES,
    Located,
    Source,
    benches_of,
    choose,
    fault,
    grouped,
    kernel_key,
    latency_ms,
    machine_of,
    newest,
)
from rooflab.kernels import registry
from rooflab.kernels.registry import Role
from rooflab.roofline.numbers import time_unit

_ROLE_ORDER: tuple[str, ...] = get_args(Role)
MAX_ROOF_RATIO = 1.05
"""If bytes/s exceed the bandwidth ceiling by more than this factor, the ceiling's measured spread is no explanation."""
_ENTRY_PATTERN = re.compile(r"^([A-Za-z]\w*) {2,}(\S.*(?:\n {4,}.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class LadderRow:
    """Holds one table row: the result of one kernel on one case (input shape)."""

    record: Record
    source: Source
    status: str
    reason: str
    """The reason why the row has no time, or the fault of its result."""
    failed: bool
    latency_ms: float | None
    over_library: Row | None
    """The speed relative to the library kernel, as `_ratio` returns it."""
    over_naive: Row | None
    facts: Facts

    @property
    def kernel(self) -> str:
        """Returns the name of the row's kernel."""
        return self.record.kernel or "no kernel"

    @property
    def traffic(self) -> str:
        """Returns the source of the bytes in the row's bytes/s: `counted`, `modelled`, or `least bytes` (that the op
        needs).  Returns `none` if the bytes are unknown."""
        record = self.record
        return (record.traffic_basis or "least bytes") if record.least_bytes or record.traffic_bytes else "none"

    @property
    def above_roof(self) -> bool:
        """Returns whether bytes/s exceed the peak bandwidth.  Then a cache served bytes, or the count is too high."""
        bytes_per_s, ceilings = self.record.bytes_per_s, self.record.ceilings
        return bool(bytes_per_s and ceilings and bytes_per_s > MAX_ROOF_RATIO * ceilings["hbm_bytes_per_s"])


@dataclass(frozen=True)
class Ladder:
    """Holds the table (ladder) of one op on one machine: the results of all its kernels."""

    machine: str
    blocks: tuple[Row, ...]
    """By `case_id` and `scheme` (dtypes), the `rows` of all comparable kernels."""
    unit: str
    """The unit of the times in the ladder's table: `us` or `ms`."""

    @property
    def not_run(self) -> dict[str, Counter[str]]:
        """Counts the cases in which a kernel could not run, for each reason and each kernel."""
        case_counts: dict[str, Counter[str]] = {}
        for row in (row for case_block in self.blocks for row in case_block["rows"] if row.status in NOT_RUN):
            case_counts.setdefault(f"{row.status}: {row.reason}", Counter())[row.kernel] += 1
        return case_counts


def ladder_lines(op: str) -> dict[str, str]:
    """Returns each kernel's description from the docstring of the op's folder, or nothing for ops outside Rooflab."""
    op_folder = Path(registry.__file__).parent / op
    if not op.isidentifier() or not (op_folder / "__init__.py").is_file():
        return {}
    docstring = importlib.import_module(f"rooflab.kernels.{op}").__doc__ or ""
    kernels = registry.kernels(op)
    return {name: " ".join(line.split()) for name, line in _ENTRY_PATTERN.findall(docstring) if name in kernels}


def ladder_rows(op: str) -> list[dict[str, str]]:
    """Returns the name, backend, description and source file of each kernel in the docstring of the op's folder."""
    rows = []
    for name, line in ladder_lines(op).items():
        kernel = registry.get_kernel(op, name)
        file = Path(str(sys.modules[inspect.unwrap(kernel.fn).__module__].__file__))
        rows.append({"rung": name, "backend": kernel.backend, "line": line, "code": "/".join(file.parts[-3:])})
    return rows


def op_ladders(located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns the results of each op that was timed or checked, on every machine, sorted by op name.

    `no_library` is the reason why torch has no call for the op; empty if torch has a call."""
    benches = benches_of(located)
    checks = newest((item for item in located if item.record.kind == "check"), kernel_key)
    checks_by_op = grouped(checks, lambda item: kernel_key(item.record)[1])
    timed_by_op = grouped(choose(benches), lambda item: kernel_key(item.record)[1])
    past_benches = grouped(benches, lambda item: _beside(item.record))
    op_results = []
    for op in sorted(timed_by_op.keys() | checks_by_op.keys()):
        kernels, spec = tuple(ladder_lines(op)), registry.ops().get(op)
        machines = grouped(timed_by_op.get(op, ()), lambda item: machine_of(item.record))
        tables = tuple(_ladder(machine, items, past_benches, kernels) for machine, items in machines.items())
        op_row = {"op": op, "order": kernels, "no_library": (spec.no_library or "") if spec else "", "ladders": tables}
        op_results.append(op_row | {"checks": _check_rows(checks_by_op.get(op, ()), kernels)})
    return tuple(op_results)


def _beside(record: Record) -> tuple[str, str, str, str]:
    """Returns the machine, op, case and scheme of a record. Kernels are compared only if all four are equal."""
    machine, op, _, case_id, scheme = kernel_key(record)
    return machine, op, case_id, scheme


def _ladder(
    machine: str,
    chosen: Sequence[Located],
    past: Mapping[tuple[str, str, str, str], list[Located]],
    order: Sequence[str],
) -> Ladder:
    """Makes the comparison table of one op on one machine. The smallest case comes first."""

    def size(item: Located) -> tuple[str, float, float]:
        return item.record.scheme or "", item.record.flops or 0.0, item.record.least_bytes or 0.0

    cases: list[Row] = []
    for case_key, group in grouped(sorted(chosen, key=size), lambda item: _beside(item.record)).items():
        group.sort(key=lambda item: _rank(item.record, order))
        rows = tuple(_row(item, group, past[case_key]) for item in group)
        cases.append({"case_id": case_key[2], "scheme": case_key[3], "rows": rows})
    latencies_ms = [row.latency_ms for case_block in cases for row in case_block["rows"] if row.latency_ms is not None]
    return Ladder(machine, tuple(cases), time_unit(latencies_ms))


def _rank(record: Record, order: Sequence[str]) -> tuple[int, int, str]:
    role, kernel = record.role, record.kernel or ""
    kernel_index = order.index(kernel) if kernel in order else len(order)
    return (_ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER)), kernel_index, kernel


def _row(item: Located, group: Sequence[Located], past: Sequence[Located]) -> LadderRow:
    record, median_ms, record_fault = item.record, latency_ms(item.record), fault(item.record)
    status, reason = record_fault or (record.status, record.reason)
    if median_ms is None and record_fault is None and not reason:
        reason = "the record holds no time"
    lib_ratio, naive_ratio = (_ratio(record, role, group, past) for role in ("library", "naive"))
    facts = facts_of(record, item.configs, item.counted)
    return LadderRow(
        record, item.source, status, reason, status not in NOT_WRONG_STATUSES, median_ms, lib_ratio, naive_ratio, facts
    )


def _ratio(record: Record, role: str, group: Sequence[Located], past: Sequence[Located]) -> Row | None:
    """Returns the speed of a record relative to the fastest kernel of role `role`, on one case.  Prefers a kernel of
    the same run, then other runs (`other_run`), whose versions or clocks may differ.  Returns None if there is none.

    A `value` of 2 means half the time.  `source` is that of the other kernel's record."""
    median_ms = latency_ms(record)
    if median_ms is None or record.role == role:
        return None
    same_run_items = [item for item in past if (item.record.role, item.record.run_id) == (role, record.run_id)]
    newest_items = [item for item in group if item.record.role == role]
    for base_items, other_run in ((same_run_items, False), (newest_items, True)):
        timed_items = [(ms, item.source) for item in base_items if (ms := latency_ms(item.record)) is not None]
        if timed_items:
            base_ms, source = min(timed_items, key=lambda pair: pair[0])
            return {"value": base_ms / median_ms, "source": source, "other_run": other_run}
    return None


def _check_rows(checks: Sequence[Located], order: Sequence[str]) -> tuple[Row, ...]:
    """Counts right and wrong results in the newest checks of each kernel on each machine, over all cases.

    `worst` is the largest ratio of an error to the error's tolerance.  `weak` is the number of cases whose tolerance
    would let a wrong answer pass."""
    rows = []
    ranked_checks = sorted(checks, key=lambda item: (machine_of(item.record), _rank(item.record, order)))
    for (machine, kernel), items in grouped(ranked_checks, lambda item: kernel_key(item.record)[:3:2]).items():
        records_that_ran = [item.record for item in items if item.record.status not in NOT_RUN]
        max_errors = [stats.get("max_error_over_tolerance") for record in records_that_ran for stats in record.errors]
        row = {
            "kernel": kernel,
            "machine": machine,
            "checked_by": ", ".join(dict.fromkeys(record.checked_by for record in records_that_ran)) or "none",
            "right": sum(record.status == "OK" for record in records_that_ran),
            "wrong": sum(record.status != "OK" for record in records_that_ran),
            "not_run": len(items) - len(records_that_ran),
            "worst": max((e for e in max_errors if e is not None), key=lambda e: inf if isnan(e) else e, default=None),
            "weak": sum(bool(record.weak) for record in records_that_ran),
            "source": items[-1].source,
        }
        rows.append(row)
    return tuple(rows)
