"""Measures a function for the pytest fixture `kernel_benchmark`: its time, and its fraction of the roofline."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rooflab.bench.core import Checked, Measurement, Record, Settings
from rooflab.roofline.model import Cost


def time_kernel(checked: Checked, cost: Cost | None = None, *, budget_s: float, min_samples: int) -> Record:
    """Times a function that passed its check, with several copies of its arguments.  Returns the record.

    After timing, the function is called and checked once more.  A wrong result makes the record INCORRECT.  Results of
    timed calls are checked too, unless the function changes its inputs."""
    op = checked.op
    op_spec = op.spec if cost is None else replace(op.spec, cost=lambda args: cost)
    timing_settings = Settings(
        device=str(op.device),
        budget_s=budget_s,
        min_samples=min_samples,
        checked=True,
        judge=checked.judged,
        roof=cost is not None,
    )
    (record,) = Measurement(op_spec, op.scheme, timing_settings).records([op.kernel], [op.case])
    check_error = checked.again() if record.status in ("OK", "NOISY") else ""
    if not check_error:
        return record
    return replace(record, status="INCORRECT", reason=f"after timing: {check_error}", latency_median_ms=None)


def extra_info(record: Record, cost: Cost | None) -> dict[str, Any]:
    """Returns JSON values that pytest-benchmark stores beside its statistics.  `record.unpack_samples` reads `samples`.

    An A/B comparison needs only these values: every sample in time order, the method, the machine, and the clocks."""
    environment = record.environment
    benchmark_info: dict[str, Any] = {
        "device": environment["gpu"]["name"] if record.device == "cuda" else environment["cpu"],
        "device_type": record.device,
        "machine_key": environment["machine_key"],
        "timer": record.timer,
        "l2_state": record.l2_state,
        "calls_per_sample": int(record.metrics.get("calls_per_sample", 1)),
        "samples": record.samples,
        "clocks": record.clocks,
        "device_kernels": list(record.device_kernels),
        "activity_hash": record.activity_hash,
        **({"cost": asdict(cost)} if cost else {}),
    }
    benchmark_info["status"] = f"{record.status}: {record.reason}" if record.status != "OK" else "OK"
    if cost is None or record.flops is None:
        return benchmark_info
    benchmark_info |= {"flops": record.flops, "bytes": record.least_bytes}
    if record.flops_per_s is not None:
        benchmark_info |= {"flops_per_s": record.flops_per_s, "bytes_per_s": record.bytes_per_s}
    if record.intensity is not None:
        benchmark_info["intensity_flop_per_byte"] = record.intensity
    if record.ceilings is None or record.bound_ms is None:
        return benchmark_info | {"roof": "unknown: no rates of this device are known, or none of these dtypes"}
    benchmark_info |= {"limiter": record.limiter, "bound_s": record.bound_ms / 1e3, "ceilings": record.ceilings}
    if record.bound_fraction is None:
        return benchmark_info | {"roof": f"NOISY: {record.ceilings['noise'] or record.reason}"}
    return benchmark_info | {f"fraction_of_{record.ceilings['kind']}_roof": record.bound_fraction}
