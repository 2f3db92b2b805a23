"""Nsight Compute's counters beside the prediction: bytes counted and modelled, pipes, stalls; and a record."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from rooflab.bench.predict.cases import Target
from rooflab.bench.predict.explain import Explanation
from rooflab.bench.predict.model import LAUNCH
from rooflab.bench.predict.ncu import L2, Profile
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.record import Record, new_run_id
from rooflab.bench.records.source_tree import circumstances
from rooflab.kernels import registry
from rooflab.kernels.configs import config_for
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Traffic

NO_PIPE = ("sm", "hbm", "occupancy", "issue")
"""Counted as pipes are, and none of them."""
NOT_A_TIME = "counted by Nsight Compute, which runs each launch alone: its duration is no time by the protocol"


def launch_rows(profile: Profile) -> list[dict[str, Any]]:
    """One row a launch: its bytes, its time, the pipe most used, and why warps waited most."""
    rows = []
    for entry in profile.launches:
        read, written = (entry.values.get(f"dram__bytes_{way}.sum") for way in ("read", "write"))
        seconds = entry.values.get("gpu__time_duration.sum")
        pipes = {name: share for name, share in entry.pipes.items() if name not in NO_PIPE}
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
                "issue_percent": entry.pipes.get("issue"),
                "busiest_pipe": None if pipe is None else f"{pipe} {pipes[pipe]:.0f}%",
                "stalls": ", ".join(stalls),
            }
        )
    return rows


def settled(target: Target, profile: Profile) -> tuple[Traffic | None, str]:
    """The HBM bytes of a call, and in words what of them ncu could not count; nothing where it could count all.

    What L2 holds of the writes when the call ends goes to HBM afterwards, so that at least the cost's writes are taken.
    """
    counted = profile.traffic
    if counted is None:
        return None, ""
    notes = []
    if profile.apart:
        notes.append("launches counted apart: what they hand on through L2 counts as read from HBM")
    spec = registry.get_op(target.op)
    least = spec.cost(**spec.make_inputs(target.case, target.scheme, torch.device("meta"), 0)).write_bytes
    if counted.write_bytes < least:
        late = f"{counted.write_bytes / 1e6:.3g} of {least / 1e6:.3g} MB were counted, and the least is taken"
        notes.append(f"writes still in L2: {late}")
    return replace(counted, write_bytes=max(counted.write_bytes, least)), "; ".join(notes)


def compared(modelled: Explanation, profile: Profile) -> list[dict[str, Any]]:
    """What was modelled beside what was counted, over the whole call; ncu's duration has no launch in it."""
    traffic, seconds = settled(modelled.target, profile)[0], profile.duration_s
    predicted_ms = modelled.predicted_ms or 0.0
    launch_ms = sum(part.ms for part in modelled.parts if part.name == LAUNCH)
    rows = [
        ("HBM bytes, MB", modelled.bytes / 1e6, None if traffic is None else traffic.bytes / 1e6),
        ("launches", float(modelled.launches), float(len(profile.launches))),
        ("ncu's duration, us", (predicted_ms - launch_ms) * 1e3, None if seconds is None else seconds * 1e6),
    ]
    return [
        {"what": what, "modelled": model, "counted": count, "ratio": count / model if count and model else None}
        for what, model, count in rows
    ]


def counted_record(explained: Explanation, profile: Profile, seed: int) -> Record:
    """A record of what was counted, without a time: ncu's is not one by the protocol, and stands among the metrics."""
    target = explained.target
    traffic, note = settled(target, profile)
    environment = snapshot()
    kernel = registry.get_kernel(target.op, target.kernel)
    # Where a log from elsewhere is read, no card is here whose choices could be asked.
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    config = target.config or config_for(kernel, target.case, target.scheme, device)
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
        reason="; ".join(text for text in (NOT_A_TIME, note) if text),
        environment=circumstances(environment, kernel),
        commit=environment.commit,
        dirty=environment.dirty,
        op=target.op,
        kernel=target.kernel,
        role=kernel.role,
        backend=kernel.backend,
        case_id=target.case.id,
        case=dict(target.case),
        scheme=target.scheme.name,
        config=None if config is None else asdict(config),
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
