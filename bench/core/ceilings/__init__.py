"""Provides the peak rates (ceilings) of this machine, from stored measurements or from a data sheet."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from rooflab.bench.base.plain import JsonObject, Row
from rooflab.bench.core.ceilings.cpu_limits import measure_cpu
from rooflab.bench.core.ceilings.cuda_limits import (
    compile_microkernels,
    kind_of,
    measure_cuda,
    microkernels_hash,
    value_in,
)
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import read
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder, check_writable
from rooflab.roofline.device import identify
from rooflab.roofline.model import Ceilings

BUDGET_S = {"cpu": 5.0, "cuda": 60.0}
REMEASURE_BUDGET_S = {"cpu": 5.0, "cuda": 20.0}
"""Seconds to measure the limits again after a reading above the ceilings."""
NO_TENSOR_CEILING = range(100, 120)
"""Compute capabilities whose tensor cores reach their rate only by tcgen05.  There is no microkernel with tcgen05."""
NO_CPU_UNIT = ("fp8_e4m3", "tf32")
"""Operand dtypes that no CPU multiplies directly; torch first widens the operands."""
LOG = logging.getLogger(__name__)
_noisy_records: dict[tuple[Path, int], list[Record]] = {}
"""NOISY limits that this process measured.  The key is the file of OK limits, and the number of threads."""


def ceilings_for(device: torch.device) -> Ceilings | None:
    """Returns the peak rates that bound a kernel's time on `device`.  The field `kind` says whether they were measured.

    On CUDA, these are the stored rates of `rooflab ceilings`, or else the data sheet's.  Without a data sheet, the
    result is None.  On a CPU, missing rates are measured now.

    A CPU has no unit for fp8 or tf32 matrix products.  Their rate is the best matrix rate of the other dtypes."""
    records, _ = MachineLimits.kept(device)
    if device.type == "cpu":
        ceilings, _ = assemble(records or MachineLimits.measured(device).records, device)
        matrix_rates = ceilings.tensor_flops_per_s if ceilings else {}
        return ceilings and replace(
            ceilings, tensor_flops_per_s={**matrix_rates, **dict.fromkeys(NO_CPU_UNIT, max(matrix_rates.values()))}
        )
    if records and (ceilings := assemble(records, device)[0]):
        return ceilings
    data_sheet = identify(torch.cuda.get_device_name(device))
    return data_sheet.ceilings() if data_sheet else None


def limits_for(device: torch.device, ceilings: Ceilings) -> Ceilings | None:
    """Returns the rates that no reading on `device` can exceed, or None if they are unknown.

    On a CPU these are the measured `ceilings` (None if NOISY).  On CUDA these are the data sheet's rates at the highest
    clock.  If it has no L2 rate (Hopper), `ceilings` gives one.  A GPU without a data sheet gets only the L2 rate."""
    if device.type == "cpu":
        return None if ceilings.noise else ceilings
    data_sheet = identify(torch.cuda.get_device_name(device))
    if data_sheet is not None:
        limits = data_sheet.ceilings(data_sheet.max_clock_hz)
    elif ceilings.l2_bytes_per_s is not None:
        limits = Ceilings(ceilings.device, ceilings.kind, math.inf, {}, math.inf)
    else:
        return None
    return replace(limits, launch_floor_s=0.0, l2_bytes_per_s=limits.l2_bytes_per_s or ceilings.l2_bytes_per_s)


class MachineLimits(NamedTuple):
    """The measured peak rates of a machine (limits), with one record for each launch shape that measured a limit."""

    records: Sequence[Record]
    reason: str = ""
    """Why the records give no ceilings; empty if they give ceilings."""

    def best(self) -> dict[str, Record]:
        """Maps each limit's name to the record with the best value, or to the first record if all of them failed."""

        def merit(record: Record) -> float:
            value = value_of(record) or 0.0
            return 1 / value if "launch_floor_s" in record.metrics else value

        best_records: dict[str, Record] = {}
        for record in self.records:
            best_record = best_records.setdefault(str(record.kernel), record)
            if merit(record) > merit(best_record):
                best_records[str(record.kernel)] = record
        return best_records

    @staticmethod
    def amount(record: Record) -> tuple[float, str]:
        """Returns the value and the unit of the limit that `record` measured; the value is 0 if the record has none."""
        return value_of(record) or 0.0, kind_of(str(record.kernel))[0]

    @staticmethod
    def compiled() -> int:
        """Compiles Hopper's microkernels without a GPU, and returns the number of compiled microkernels."""
        return compile_microkernels()

    @classmethod
    def kept(cls, device: torch.device) -> MachineLimits:
        """Returns the limits (peak rates) that were measured earlier and stored for this machine.  If there are none,
        or the machine has changed since, returns the reason in place of stored limits.

        A GPU must have the same card, driver, power limit, clocks and microkernels.  A CPU must have the same torch,
        CPU and threads.  NVML cannot report a locked clock (`nvidia-smi -lgc`); the clocks in the records show it."""
        environment, limits_path = _here(device)
        noisy_records = _noisy_records.get((limits_path, environment.threads), [])
        if not limits_path.is_file():
            return cls(noisy_records, "none were measured on this device")
        try:
            records = read(limits_path)
            old_setup = _conditions(records[0].environment, device)
            new_setup = _conditions(environment.to_dict() | {"microkernels": microkernels_hash()}, device)
            setup_diffs = [
                f"{name} {old_setup[name]}, and it is {value}"
                for name, value in new_setup.items()
                if old_setup[name] != value
            ]
        except (ValueError, LookupError, TypeError):
            return cls(noisy_records, "what is kept is damaged or of another version")
        return (
            cls(noisy_records, f"they were measured with {setup_diffs[0]}")
            if setup_diffs
            else cls(records, assemble(records, device)[1])
        )

    @classmethod
    def measured(cls, device: torch.device, budget_s: float | None = None, raising: bool = False) -> MachineLimits:
        """Measures the limits (peak rates) of this machine, and stores the records.

        If a measurement is incomplete, valid stored limits stay.  With `raising`, or if the new limits of a CPU are
        NOISY, the better of the old and the new record is stored for each limit, because noise only lowers a rate.
        Without old limits, NOISY ones are not stored.  Raises `ValueError` if CuPy is missing on a GPU, or if the cache
        folder is read-only."""
        check_writable("ROOFLAB_CACHE", cache_folder())
        environment, limits_path = _here(device)
        budget_s = budget_s or BUDGET_S[device.type]
        on_cpu = device.type == "cpu"
        records = measure_cpu(environment, budget_s) if on_cpu else measure_cuda(device, environment, budget_s)
        _, reason = assemble(records, device)
        old_records, missing_text = cls.kept(device)
        is_noisy = any(record.status == "NOISY" for record in records)
        if raising or (is_noisy and not missing_text):
            records = better(old_records, records)
            reason = reason or ("" if raising else "the machine was busy, so a kept rate can only have risen")
        elif reason and old_records and not missing_text:
            return cls(records, f"{reason}; those of {max(record.timestamp for record in old_records)} are kept")
        ceilings, _ = assemble(records, device)
        records = [replace(record, ceilings=asdict(ceilings) if ceilings else None) for record in records]
        if ceilings and ceilings.noise:
            _noisy_records[limits_path, environment.threads] = records
            LOG.warning("ceilings: NOISY: %s", ceilings.noise)
        else:
            write_whole(limits_path, "".join(f"{record.to_json()}\n" for record in records))
        return cls(records, reason)

    @property
    def rows(self) -> list[Row]:
        """Returns a row for each limit, with its best record and the data sheet's value (None if unknown).

        `at_clock` is the data sheet's value at the measured SM clock, or None.  `reached` is the measured value divided
        by `at_clock`, or else by the data sheet's value.
        """
        return [_row(record) for record in self.best().values()]


this_machine = cache(Environment.now)
"""The environment, read once per process, because this calls git and NVML.  Driver and clock limits do not change."""


def _here(device: torch.device) -> tuple[Environment, Path]:
    """Returns this machine's present environment, and the path of the file with the measured limits of `device`."""
    environment = replace(this_machine(device.index or 0), threads=torch.get_num_threads())
    name = environment.machine_key
    if device.type == "cuda":
        uuid = environment.gpu.uuid if environment.gpu else ""
        name += f".cuda-{hashlib.sha256(uuid.encode()).hexdigest()[:8]}"
    return environment, cache_folder() / "ceilings" / f"{name}.jsonl"


def _conditions(environment: JsonObject, device: torch.device) -> dict[str, object]:
    if device.type == "cuda":
        return {**environment["gpu"], "microkernels": environment["microkernels"]}
    return {name: environment[name] for name in ("threads", "torch", "cpu")}


def raise_ceilings(ceilings: Ceilings, device: torch.device) -> Ceilings:
    """Measures the peak rates again after a reading above `ceilings`.  Stored rates never become lower.

    If the new measurement fails, the stored rates remain in use, and a warning gives the reason."""
    try:
        _, missing_text = MachineLimits.measured(device, REMEASURE_BUDGET_S[device.type], raising=True)
    except ValueError as error:
        missing_text = str(error)
    if missing_text:
        LOG.warning("ceilings: measuring again failed (%s); what was measured before still counts", missing_text)
    return ceilings_for(device) or ceilings


def better(before: Sequence[Record], again: Sequence[Record]) -> list[Record]:
    """Returns, for each limit, the records of the better measurement: a higher rate, or a lower launch time.

    If any record is OK, NOISY rates become OK too, because the machine did reach these rates."""
    best_records = MachineLimits([*again, *before]).best()
    records = [record for record in (*before, *again) if record.run_id == best_records[str(record.kernel)].run_id]
    if all(record.status != "OK" for record in (*before, *again)):
        return records
    return [replace(record, status="OK", reason="") if record.status == "NOISY" else record for record in records]


def value_of(record: Record) -> float | None:
    """Returns the value of a limit: bytes/s, FLOP/s, operations/s, or the shortest launch in seconds; else None."""
    metrics = record.metrics
    return record.bytes_per_s or record.flops_per_s or metrics.get("ops_per_s") or metrics.get("launch_floor_s")


def assemble(records: Sequence[Record], device: torch.device) -> tuple[Ceilings | None, str]:
    """Returns `(ceilings, "")` from measured limits, or `(None, text)`; the text names the missing limits.

    A rate is the best of several records: of four kinds of memory access, or of several instructions of a dtype."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    sm_version = 10 * major + minor
    limits = {limit: value for limit, record in MachineLimits(records).best().items() if (value := value_of(record))}
    tensor_rates: dict[str, float] = {}
    for record in records:
        if record.scheme is not None and record.flops_per_s:
            tensor_rates[record.scheme] = max(tensor_rates.get(record.scheme, 0.0), record.flops_per_s)

    def named(start: str) -> dict[str, float]:
        return {limit.removeprefix(start): value for limit, value in limits.items() if limit.startswith(start)}

    access_rates, launch_floors = named("memory ") or named("hbm_"), named("launch ")
    vector_rate = limits.get("fma") or limits.get("fp32 vector")
    missing_rates = [missing_name for missing_name, rate in (("HBM", access_rates), ("fma", vector_rate)) if not rate]
    if sm_version in NO_TENSOR_CEILING:
        missing_rates.append("a microkernel for this architecture's tensor cores")
    elif sm_version >= 80 and not tensor_rates:
        missing_rates.append("tensor cores")
    if missing_rates or vector_rate is None:
        return None, f"no measured ceilings without {', '.join(missing_rates)}"
    environment = records[0].environment
    name = environment["gpu"]["name"] if sm_version else environment["cpu"]
    data_sheet = identify(name)
    ceilings = Ceilings(
        device=data_sheet.name if data_sheet else name,
        kind="measured",
        hbm_bytes_per_s=max(access_rates.values()),
        tensor_flops_per_s=tensor_rates | {"fp32": vector_rate},
        vector_flops_per_s=vector_rate,
        sfu_ops_per_s=max((limits[name] for name in ("ex2", "rsqrt") if name in limits), default=None),
        launch_floor_s=min(launch_floors.values(), default=0.0),
        l2_bytes_per_s=max(named("l2_").values(), default=None),
        access_bytes_per_s=access_rates,
        launch_floors_s=launch_floors,
        noise=next((record.reason for record in records if record.status == "NOISY"), ""),
    )
    return ceilings, ""


def _row(record: Record) -> Row:
    limit_name, measured_value, clock_hz = str(record.kernel), value_of(record), record.metrics.get("sm_clock_hz")
    base_unit, _ = kind_of(limit_name)
    unit_prefix, unit_scale = ("u", 1e-6) if base_unit == "s" else ("G", 1e9) if record.device == "cpu" else ("T", 1e12)
    device = identify(record.environment["gpu"]["name"]) if record.device == "cuda" else None
    data_sheet_value = value_in(device.ceilings(), record) if device else None
    clock_ceilings = device.ceilings(min(clock_hz, device.max_clock_hz)) if device and clock_hz is not None else None
    value_at_clock = value_in(clock_ceilings, record) if clock_ceilings else None
    expected_value = value_at_clock or data_sheet_value
    return {
        "limit": limit_name,
        "measured": measured_value and measured_value / unit_scale,
        "datasheet": data_sheet_value and data_sheet_value / unit_scale,
        "at_clock": value_at_clock and value_at_clock / unit_scale,
        "unit": unit_prefix + base_unit,
        "reached": f"{measured_value / expected_value:.0%}"
        if measured_value and expected_value and base_unit != "s"
        else None,
        "clock_ghz": clock_hz and clock_hz / 1e9,
        "how": ", ".join(f"{name}={value}" for name, value in (record.config or {}).items()),
        "status": record.status,
        "reason": record.reason,
    }
