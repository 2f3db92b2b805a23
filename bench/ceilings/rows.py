"""Ceilings side by side: measured, on the data sheet, and on the data sheet at the clock that was held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rooflab.bench.ceilings.microkernels.microkernel import Unit
from rooflab.bench.ceilings.readings import Reading, best_of, rate_of
from rooflab.bench.records.record import DeviceType, Record
from rooflab.bench.records.samples import pack_samples
from rooflab.roofline.device import Device
from rooflab.roofline.model import Ceilings

UNITS: Mapping[Unit, tuple[str, float]] = {
    "byte": ("TB/s", 1e12),
    "flop": ("TFLOP/s", 1e12),
    "op": ("Top/s", 1e12),
    "launch": ("us", 1e-6),
}
COLUMNS = ("limit", "measured", "datasheet", "at_clock", "unit", "reached", "clock_ghz", "how", "status", "reason")


def card_rows(readings: Sequence[Reading], device: Device | None) -> list[dict[str, Any]]:
    """A row for each limit of a GPU: the reading that counts, and what the data sheet says, None where it is silent.

    `at_clock` is the data sheet at the clock that the SMs held during this very reading; memory is clocked apart.
    `reached` is what was measured over that, or over the data sheet where no clock scales it.
    `device` is None for a GPU that is in no table.
    """
    return [_card_row(reading, device) for reading in best_of(readings).values()]


def _card_row(reading: Reading, device: Device | None) -> dict[str, Any]:
    unit, scale = UNITS[reading.unit]
    sheet = device.ceilings() if device else None
    held = None
    if device is not None and reading.clock_hz is not None:
        held = device.ceilings(min(reading.clock_hz, device.max_clock_hz))
    if reading.unit == "launch":
        measured, on_sheet, at_clock = reading.floor_s, (sheet.launch_floor_s or None) if sheet else None, None
    else:
        measured = reading.rate_per_s
        on_sheet, at_clock = (rate_of(ceilings, reading.limit, reading.dtype) for ceilings in (sheet, held))
    beside = at_clock or on_sheet
    return {
        "limit": reading.limit,
        "measured": _scaled(measured, scale),
        "datasheet": _scaled(on_sheet, scale),
        "at_clock": _scaled(at_clock, scale),
        "unit": unit,
        "reached": f"{measured / beside:.0%}" if measured and beside and reading.unit != "launch" else None,
        "clock_ghz": _scaled(reading.clock_hz, 1e9),
        "how": ", ".join(f"{name}={value}" for name, value in reading.config.items()),
        "status": reading.status,
        "reason": reading.reason,
    }


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale


def cpu_rows(ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each limit of a CPU, whose data sheet nobody keeps here."""
    found = [(f"memory {access}", rate, "GB/s") for access, rate in ceilings.access_bytes_per_s.items()]
    found += [(f"{dtype} matrix", rate, "GFLOP/s") for dtype, rate in ceilings.tensor_flops_per_s.items()]
    found.append(("fp32 vector", ceilings.vector_flops_per_s, "GFLOP/s"))
    return [{"limit": limit, "measured": rate / 1e9, "unit": unit, "status": "OK"} for limit, rate, unit in found]


def card_records(
    readings: Sequence[Reading], ceilings: Ceilings | None, environment: Mapping[str, Any], run_id: str
) -> list[Record]:
    """A record for each reading, failed ones included; every one holds the ceilings that they make together."""
    return [_record(reading, ceilings, environment, run_id) for reading in readings]


def _record(reading: Reading, ceilings: Ceilings | None, environment: Mapping[str, Any], run_id: str) -> Record:
    rate = reading.rate_per_s
    timed = bool(reading.seconds) and reading.status in ("OK", "INVALID")
    metrics = {"work": reading.work}
    if reading.clock_hz is not None:
        metrics["sm_clock_hz"] = reading.clock_hz
    if reading.floor_s is not None:
        metrics["launch_floor_s"] = reading.floor_s
    if reading.unit == "op" and rate is not None:
        metrics["ops_per_s"] = rate
    return Record(
        kind="ceiling",
        run_id=run_id,
        status=reading.status,
        reason=reading.reason,
        environment=environment,
        commit=environment["commit"],
        dirty=environment["dirty"],
        kernel=reading.limit,
        backend="cuda",
        scheme=reading.dtype,
        config=reading.config,
        device="cuda",
        checked_by="gpu",
        basis="measured" if timed else "bound",
        timer=reading.timer,
        l2_state=reading.l2_state,
        latency_median_ms=1e3 * (reading.median_s or 0.0) if timed else None,
        samples=pack_samples(reading.seconds) if timed else None,
        sample_count=len(reading.seconds) if timed else None,
        flops_per_s=rate if reading.unit == "flop" else None,
        bytes_per_s=rate if reading.unit == "byte" else None,
        ceilings=None if ceilings is None else asdict(ceilings),
        clocks=reading.clocks,
        metrics=metrics,
    )


def cpu_records(ceilings: Ceilings, environment: Mapping[str, Any], run_id: str) -> list[Record]:
    """A record for each limit of a CPU; only the best rate of each is known."""
    device: DeviceType = "cpu"
    common: dict[str, Any] = {
        "kind": "ceiling",
        "run_id": run_id,
        "status": "OK",
        "environment": environment,
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "backend": "torch",
        "device": device,
        "checked_by": "none",
        "basis": "measured",
        "ceilings": asdict(ceilings),
    }
    moved = [
        Record(**common, kernel=f"memory {access}", bytes_per_s=rate)
        for access, rate in ceilings.access_bytes_per_s.items()
    ]
    rates = [(f"{dtype} matrix", dtype, rate) for dtype, rate in ceilings.tensor_flops_per_s.items()]
    rates.append(("fp32 vector", "fp32", ceilings.vector_flops_per_s))
    return moved + [Record(**common, kernel=kernel, scheme=dtype, flops_per_s=rate) for kernel, dtype, rate in rates]
