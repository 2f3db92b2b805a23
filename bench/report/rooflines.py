"""Makes tables of each machine's ceilings (bandwidth and FLOP/s), and roofline figures with its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from rooflab.bench.base.decode import decoded
from rooflab.bench.base.plain import Row
from rooflab.bench.core import MachineLimits
from rooflab.bench.report.figures import Drawing, drawing_of, largest_cases, placed
from rooflab.bench.report.sources import Located, Source, grouped, latency_ms, machine_of
from rooflab.roofline.device import identify
from rooflab.roofline.model import CeilingKind, Ceilings
from rooflab.roofline.numbers import digits, plain_value, si, whole


def ceiling_tables(located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns a table of ceilings for each machine with measured or recorded ceilings.

    `rows` are the quantities that bound a kernel: each kind's text, and `share`, the measured value over the data
    sheet's.  `sources` are the records with these ceilings; if none, they come from `roofline/device.py`.  `readings`
    are those from which the measured ceilings were computed.  `clock` is that of the column at a clock, if that column
    was computed here."""
    ceiling_items = (item for item in located if item.record.ceilings or item.record.kind == "ceiling")
    return tuple(
        _table(machine, items) for machine, items in grouped(ceiling_items, lambda it: machine_of(it.record)).items()
    )


def ceilings_for(items: Sequence[Located]) -> dict[CeilingKind, tuple[Ceilings, Source | None]]:
    """Returns the newest ceilings of each kind in one machine's records.  Two kinds come from the table of GPUs if the
    records lack them: ceilings of the data sheet, and ceilings at the lowest recorded clock."""
    newest_ceilings: dict[CeilingKind, tuple[Ceilings, Source | None]] = {}
    for item in items:
        if item.record.ceilings:
            ceilings = decoded(Ceilings, item.record.ceilings)
            if not ceilings.noise or ceilings.kind not in newest_ceilings:
                newest_ceilings[ceilings.kind] = (ceilings, item.source)
    gpus = [gpu for item in items if (gpu := item.record.environment.get("gpu"))]
    device = identify(str(gpus[-1].get("name", ""))) if gpus else None
    if device is None:
        return newest_ceilings
    newest_ceilings.setdefault("datasheet", (device.ceilings(), None))
    clock = held_clock_mhz(items)
    if clock is not None and 0 < clock * 1e6 <= device.max_clock_hz:
        newest_ceilings.setdefault("at_clock", (device.ceilings(clock * 1e6), None))
    return newest_ceilings


def held_clock_mhz(items: Sequence[Located]) -> float | None:
    """Returns the lowest SM clock of all records in MHz, or None if no record has a clock.

    Each record gives one clock: the clock that the device measured, or else the highest clock that NVML reported.
    NVML's lowest clock is not used, because it may be that of an idle GPU."""
    clocks_mhz = []
    for item in items:
        record_clocks = item.record.clocks or {}
        sm_clock_hz, mhz = record_clocks.get("sm_clock_hz"), record_clocks.get("sm_clock_mhz")
        if isinstance(sm_clock_hz, int | float) and sm_clock_hz > 0:
            clocks_mhz.append(sm_clock_hz / 1e6)
        elif isinstance(mhz, list | tuple) and mhz and isinstance(mhz[-1], int | float) and mhz[-1] > 0:
            clocks_mhz.append(float(mhz[-1]))
    return min(clocks_mhz, default=None)


def _table(machine: str, items: Sequence[Located]) -> Row:
    newest_ceilings = ceilings_for(items)
    limits_by_kind = {roof_kind: _limits(ceilings) for roof_kind, (ceilings, _) in newest_ceilings.items()}
    rows = []
    for name in dict.fromkeys(name for limits in limits_by_kind.values() for name in limits):
        value_by_kind = {roof_kind: limits[name] for roof_kind, limits in limits_by_kind.items() if name in limits}
        has_both_kinds = "measured" in value_by_kind and "datasheet" in value_by_kind and not name.endswith("floor")
        peak_ratio = value_by_kind["measured"][0] / value_by_kind["datasheet"][0] if has_both_kinds else None
        texts = {roof_kind: text for roof_kind, (_, text) in value_by_kind.items()}
        rows.append({"name": name, "texts": texts, "share": peak_ratio})
    clock = held_clock_mhz(items) if "at_clock" in newest_ceilings and newest_ceilings["at_clock"][1] is None else None
    return {
        "machine": machine,
        "device": next(iter(newest_ceilings.values()))[0].device if newest_ceilings else machine,
        "clock": f"{whole(clock)} MHz" if clock else "",
        "rows": tuple(rows),
        "sources": tuple(source for _, source in newest_ceilings.values() if source is not None),
        "readings": tuple(readings_of(items)),
    }


def _limits(ceilings: Ceilings) -> dict[str, tuple[float, str]]:
    """Returns the machine's known peak rates by name, each as a number and as text. Also returns the launch time."""
    rates = {"memory bandwidth": (ceilings.hbm_bytes_per_s, "B/s")}
    rates |= {f"matrix {dtype}": (rate, "FLOP/s") for dtype, rate in sorted(ceilings.tensor_flops_per_s.items())}
    rates |= {"vector fp32": (ceilings.vector_flops_per_s, "FLOP/s")}
    rates |= {"special functions": (ceilings.sfu_ops_per_s or 0, "op/s"), "L2": (ceilings.l2_bytes_per_s or 0, "B/s")}
    limit_by_name = {name: (rate, f"{si(rate)}{unit_text}") for name, (rate, unit_text) in rates.items() if rate}
    launch_s = ceilings.launch_floor_s
    return limit_by_name | ({"launch floor": (launch_s, f"{digits(launch_s * 1e6)} µs")} if launch_s else {})


def readings_of(items: Sequence[Located]) -> list[Row]:
    """Returns the best result of each microkernel in its newest run, over all launch shapes.

    `how` holds the timer and the launch shape."""
    valid_ceiling_items = [item for item in items if item.record.kind == "ceiling" and item.record.status == "OK"]
    valid_ceiling_items = [item for item in valid_ceiling_items if 0 < MachineLimits.amount(item.record)[0] < inf]
    readings = []
    for limit_items in grouped(
        valid_ceiling_items, lambda item: (item.record.kernel or item.record.case_id, item.record.scheme)
    ).values():
        run_items = [item for item in limit_items if item.record.run_id == limit_items[-1].record.run_id]
        ((limit_name, record),) = MachineLimits([item.record for item in run_items]).best().items()
        limit_value, unit_text = MachineLimits.amount(record)
        text = f"{digits(limit_value * 1e6)} µs" if unit_text == "s" else f"{si(limit_value)}{unit_text}"
        name = f"{limit_name} {record.scheme}" if record.scheme and record.scheme not in limit_name else limit_name
        timing_method = ", ".join(filter(None, (record.timer, plain_value(record.config or ""))))
        source = next(item.source for item in run_items if item.record is record)
        readings.append({"name": name, "text": text, "how": timing_method, "source": source})
    return readings


def rooflines(located: Sequence[Located], chosen: Sequence[Located]) -> tuple[Drawing, ...]:
    """Returns a figure for each machine with a kernel time.  The figure shows only the largest case of each op."""
    records_by_machine, machine_drawings = grouped(located, lambda item: machine_of(item.record)), []
    for machine, items in grouped(chosen, lambda item: machine_of(item.record)).items():
        roofs = [ceilings for ceilings, _ in ceilings_for(records_by_machine[machine]).values()]
        timed_records = [item.record for item in items if latency_ms(item.record) is not None]
        largest_ids = {id(record) for record in largest_cases([item.record for item in items])}
        if records := [record for record in timed_records if id(record) in largest_ids] if roofs else []:
            machine_drawing = replace(drawing_of(machine, records, roofs), unplaced=placed(timed_records, roofs)[1])
            machine_drawings += [machine_drawing] if machine_drawing.points else []
    return tuple(machine_drawings)
