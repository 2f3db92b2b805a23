"""Draws the times of one engine step as a stacked bar for each record.  The parts of a bar are the times of the ops."""

from __future__ import annotations

from collections.abc import Sequence

from rooflab.bench.base.plain import Row, plain
from rooflab.bench.core import Record
from rooflab.bench.report.facts import facts_of
from rooflab.bench.report.sources import Located, grouped, machine_of
from rooflab.kernels import registry

CASE_ID = "ledger"
NON_OP_METRICS = ("host_ms", "timers_ms", "step_ms", "itl_ms")

SEGMENT_COLOURS = (
    "#1f83c4 #d1601f #1a9564 #c4569c #a7694f #8f7a12 #8d6fd1 #d6494c #148f96 #b0607a #6f9420 #b5771a".split()
)
"""Colours that are readable on white and on dark pages: a contrast of at least 3 to 1 to both; a test checks this."""
HOST_NAME, GREY = "host and gaps", "#7b828b"


def ledger_groups(located: Sequence[Located]) -> tuple[Row, ...]:
    """Makes groups of bars from the records with times of engine steps.  Other records are ignored.

    A group is of one kind of step of one model on one machine, the oldest bar first.  Its `names` are the name and the
    colour of each segment.  A segment is the time of one op with one weight (such as `qkv_proj`), or the host's."""
    steps = [item for item in located if item.record.kind == "engine" and item.record.case_id == CASE_ID]
    ok_items = sorted((item for item in steps if item.record.status == "OK"), key=lambda item: item.record.timestamp)
    items_by_machine = grouped(ok_items, lambda item: (machine_of(item.record), _title(item.record)))
    return tuple(_group(title, group_items) for (_, title), group_items in items_by_machine.items())


def _title(record: Record) -> str:
    case = plain(dict(record.case))
    step_text = f"{case['kind']} of {case['batch']} x {case['context']} tokens"
    return f"{case['model']} in {case['dtype']}: {step_text} on {case['of']}"


def _group(title: str, items: Sequence[Located]) -> Row:
    op_ms = [_parts(item.record) for item in items]
    max_bar_ms = max(sum(ms.values()) for ms in op_ms)
    names = sorted({name for ms in op_ms for name in ms}, key=lambda name: -max(ms.get(name, 0.0) for ms in op_ms))
    colour_cycle = iter(SEGMENT_COLOURS * 2)
    colour_by_name = {name: GREY if name == HOST_NAME else next(colour_cycle) for name in names}
    kernels = [{(op, name) for op, name in item.record.case.items() if op in registry.ops()} for item in items]
    common_kernels = set.intersection(*kernels)
    bars = []
    for item, ms, bar_kernels in zip(items, op_ms, kernels, strict=True):
        bar = {
            "record": item.record,
            "machine": machine_of(item.record),
            "step_ms": item.record.metrics["step_ms"],
            # The kernels that no other bar of the group has.
            "kernels": ", ".join(f"{op}={name}" for op, name in sorted(bar_kernels - common_kernels)),
            "segments": tuple(
                # The length is in percent of the widest bar of the group.
                {"name": name, "ms": ms[name], "percent": 100 * ms[name] / max_bar_ms, "colour": colour_by_name[name]}
                for name in names
                if ms.get(name)
            ),
            "facts": facts_of(item.record),
            "source": item.source,
        }
        bars.append(bar)
    return {"title": title, "bars": tuple(bars), "names": tuple(colour_by_name.items())}


def _parts(record: Record) -> dict[str, float]:
    """Returns the ms of each op and of the host. An op has one entry for each weight, such as `qkv_proj`."""
    ms_by_name: dict[str, float] = {}
    for metric_name, metric_value in record.metrics.items():
        if metric_name not in NON_OP_METRICS and not metric_name.endswith("_bound_ms"):
            op, call_site, _ = metric_name.split(".", 2)
            name = op if op == call_site else f"{op} {call_site}"
            ms_by_name[name] = ms_by_name.get(name, 0.0) + metric_value
    return ms_by_name | {HOST_NAME: max(0.0, record.metrics["host_ms"])}
