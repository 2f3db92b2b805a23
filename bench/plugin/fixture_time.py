"""Device time for the fixture `kernel_benchmark`: samples, device activity, and the fraction of each roof."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rooflab.bench.core import Checked, Measurement, Record, Settings
from rooflab.roofline.model import Ceilings, Cost, bound


def time_kernel(checked: Checked, cost: Cost | None = None, *, budget_s: float, min_samples: int) -> Record:
    """The record of the times of a function that has been checked, on several copies of its arguments.

    It is INCORRECT if the results of the timed calls are wrong, which are judged unless the function changes its
    inputs, or if the result of one more call is.
    """
    op = checked.op
    spec = op.spec if cost is None else replace(op.spec, cost=lambda args: cost)
    settings = Settings(
        device=str(op.device),
        budget_s=budget_s,
        min_samples=min_samples,
        checked=True,
        judge=checked.judged,
        roof=cost is not None,
    )
    (record,) = Measurement(spec, op.scheme, settings).records([op.kernel], [op.case])
    wrong = checked.again() if record.status in ("OK", "NOISY") else ""
    if not wrong:
        return record
    return replace(record, status="INCORRECT", reason=f"after timing: {wrong}", latency_median_ms=None)


def extra_info(record: Record, cost: Cost | None) -> dict[str, Any]:
    """The JSON values stored next to pytest-benchmark's statistics; `record.unpack_samples` reads `samples`.

    They hold all that an A/B needs from a reading: every sample in time order, the method, the machine, and the clocks.
    """
    environment = record.environment
    info: dict[str, Any] = {
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
    info["status"] = f"{record.status}: {record.reason}" if record.status != "OK" else "OK"
    seconds = (record.latency_median_ms or 0.0) / 1e3
    if cost is None or not seconds > 0 or record.status == "NOISY":
        return info
    info |= {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "flops_per_s": cost.flops / seconds,
        "bytes_per_s": cost.bytes / seconds,
    }
    if cost.bytes:
        info["intensity_flop_per_byte"] = cost.intensity
    return info | _roofs(cost, seconds, Ceilings(**record.ceilings) if record.ceilings else None)


def _roofs(cost: Cost, seconds: float, ceilings: Ceilings | None) -> dict[str, Any]:
    """The fraction of each roof that a reading reaches."""
    if ceilings is None:
        return {"roof": "unknown: no data sheet of this device is in the table"}
    if any(dtype not in ceilings.tensor_flops_per_s for dtype in cost.tensor_flops):
        return {"roof": f"unknown: {ceilings.device} has no rate for {', '.join(cost.tensor_flops)}"}
    limit = bound(cost, ceilings)
    fields = {"limiter": limit.limiter, "bound_s": limit.seconds, "ceilings": asdict(ceilings)}
    if ceilings.noise:
        return fields | {"roof": f"NOISY: {ceilings.noise}"}
    parts = {part: part_s for part, part_s in limit.parts.items() if part_s}
    fields[f"fraction_of_{ceilings.kind}_roof"] = limit.fraction(seconds)
    return fields | {f"fraction_of_{ceilings.kind}_{part}_roof": part_s / seconds for part, part_s in parts.items()}
