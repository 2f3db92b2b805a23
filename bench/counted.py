"""Nsight Compute's counters beside the prediction: bytes counted and modelled, pipes, stalls; and a record."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rooflab.bench.environment import snapshot
from rooflab.bench.explain import Explanation
from rooflab.bench.ncu import L2, Profile
from rooflab.bench.records import Record, new_run_id
from rooflab.kernels import registry
from rooflab.roofline.device import get_device

NOT_A_TIME = "counted by Nsight Compute, which runs each launch alone: its duration is no time by the protocol"


def launch_rows(profile: Profile) -> list[dict[str, Any]]:
    """One row a launch: its bytes, its time, the pipe most used, and why warps waited most."""
    rows = []
    for entry in profile.launches:
        read, written = (entry.values.get(f"dram__bytes_{way}.sum") for way in ("read", "write"))
        seconds = entry.values.get("gpu__time_duration.sum")
        pipes = {name: share for name, share in entry.pipes.items() if name not in ("sm", "hbm", "occupancy")}
        pipe = max(pipes, key=lambda name: pipes[name], default=None)
        stalls = [f"{reason} {warps:.2f}" for reason, warps in list(entry.stalls.items())[:3]]
        rows.append(
            {
                "launch": entry.kernel,
                "grid": entry.grid,
                "read_mbytes": None if read is None else read / 1e6,
                "write_mbytes": None if written is None else written / 1e6,
                "us": None if seconds is None else seconds * 1e6,
                "hbm_percent": entry.pipes.get("hbm"),
                "sm_percent": entry.pipes.get("sm"),
                "occupancy_percent": entry.pipes.get("occupancy"),
                "busiest_pipe": None if pipe is None else f"{pipe} {pipes[pipe]:.0f}%",
                "stalls": ", ".join(stalls),
            }
        )
    return rows


def compared(modelled: Explanation, profile: Profile) -> list[dict[str, Any]]:
    """What was modelled beside what was counted, over the whole call."""
    traffic, seconds = profile.traffic, profile.duration_s
    rows = [
        ("HBM bytes, MB", modelled.bytes / 1e6, None if traffic is None else traffic.bytes / 1e6),
        ("launches", float(modelled.launches), float(len(profile.launches))),
        ("time, us", (modelled.predicted_ms or 0.0) * 1e3, None if seconds is None else seconds * 1e6),
    ]
    return [
        {"what": what, "modelled": model, "counted": count, "ratio": count / model if count and model else None}
        for what, model, count in rows
    ]


def counted_record(explained: Explanation, profile: Profile, seed: int) -> Record:
    """A record of what was counted, without a time: ncu's is not one by the protocol, and stands among the metrics."""
    target, traffic = explained.target, profile.traffic
    environment = snapshot()
    kernel = registry.get_kernel(target.op, target.kernel)
    metrics: dict[str, float] = {}
    if profile.duration_s is not None:
        metrics["ncu_duration_ms"] = profile.duration_s * 1e3
    if (through_l2 := profile.total(L2)) is not None:
        metrics["l2_bytes"] = through_l2
    longest = max(profile.launches, key=lambda entry: entry.values.get("gpu__time_duration.sum", 0.0))
    metrics |= {f"{name.replace('/', '_')}_percent": value for name, value in longest.pipes.items()}
    metrics |= {f"stall_{name}_warps_per_issue": value for name, value in longest.stalls.items()}
    return Record(
        kind="bench",
        run_id=new_run_id(),
        status="OK",
        reason=NOT_A_TIME,
        environment=environment.to_dict(),
        commit=environment.commit,
        dirty=environment.dirty,
        op=target.op,
        kernel=target.kernel,
        role=kernel.role,
        backend=kernel.backend,
        case_id=target.case.id,
        case=dict(target.case),
        scheme=target.scheme.name,
        seed=seed,
        device="cuda",
        flops=explained.flops,
        least_bytes=explained.least_bytes,
        traffic_bytes=traffic.bytes if traffic else None,
        traffic_basis="counted" if traffic else None,
        intensity=explained.flops / traffic.bytes if traffic and traffic.bytes else None,
        bound_ms=explained.bound_ms,
        limiter=explained.limiter,
        ceilings=asdict(get_device(explained.gpu).ceilings()),
        predicted_ms=explained.predicted_ms,
        prediction_error=explained.prediction_error,
        compiled=explained.compiled,
        device_kernels=tuple(entry.kernel for entry in profile.launches),
        metrics=metrics,
    )
