"""Targets of norms and activations over many rows: a share of the bandwidth that a copy reaches on the same card."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from targets.measures import answer, cases_of, contenders, latencies, measure, unmeasured, without_bandwidth
from targets.target import AcceptanceTarget, target

from rooflab.bench.suite.entries import Context, EntryOutcome

VALUES = 2**26
"""The number of values of each input: 128 MiB in bf16, so that at least 256 MB move."""
WIDE = {1024: 0.95, 4096: 0.95, 32768: 0.95}
SHORT = {128: 0.85, 512: 0.85}
LONG = {65536: 0.93, 262144: 0.93}
"""By width of a row, the share of a copy's bandwidth that a kernel must reach."""


def of_copy(context: Context, op: str, least: Mapping[str, float]) -> EntryOutcome:
    """Compares the best rung of each case: its bandwidth for the least bytes with a copy's on this card (`least` has
    the required share by case), and its speed with the best of torch, torch.compile and the peers."""
    cases = cases_of(context, op, list(least))
    needed = f"{min(least.values()):.0%} to {max(least.values()):.0%} of a copy's bandwidth, and no other kernel faster"
    records, cut = measure(context, op, contenders(context, op), cases, "bf16")
    times, roles = latencies(records), {str(record.kernel): record.role for record in records}
    figures: dict[str, object] = {}
    met = True
    for case, share in zip(cases, least.values(), strict=False):
        own = {name: ms[case.id] for name, ms in times.items() if roles[name] == "optimized" and case.id in ms}
        if not own:
            return unmeasured(records, cut, needed)
        best = min(own, key=lambda name: own[name])
        record = next(r for r in records if r.kernel == best and r.case_id == case.id)
        rates = (record.ceilings or {}).get("access_bytes_per_s") or {}
        reached = (record.least_bytes or 0.0) / (own[best] * 1e-3) / float(rates.get("copy", inf))
        others = [ms[case.id] for name, ms in times.items() if roles[name] != "optimized" and case.id in ms]
        beside = min(others, default=inf) / own[best]
        figures[case.id] = f"{best}: {reached:.1%} of a copy, {beside:.2f} times the best other kernel's speed"
        met = met and reached >= share and beside >= 1
    return answer(context, met, needed, figures, without_bandwidth(records))


def _target(op: str, cost_s: float, value: float, widths: Mapping[int, float], case: str) -> AcceptanceTarget:
    least = {case.format(T=VALUES // width, width=width): share for width, share in widths.items()}
    told = ", ".join(f"{share:.0%} at {width}" for width, share in widths.items())
    return target(
        f"{op}.copy",
        f"{op} bf16, at least 256 MB moved, cold L2: of a copy's bandwidth {told}; at least the best of torch, "
        "torch.compile and the peers that are installed",
        of_copy,
        cost_s=cost_s,
        value=value,
        least=least,
    )


TARGETS = (
    _target("rmsnorm", 75.0, 74.6, {**WIDE, **SHORT, **LONG}, "T={T},H={width},eps=1e-05"),
    _target(
        "fused_add_rmsnorm", 70.0, 74.5, {**WIDE, 512: SHORT[512], 65536: LONG[65536]}, "T={T},H={width},eps=1e-05"
    ),
    _target("silu_and_mul", 60.0, 74.4, {**WIDE, 512: SHORT[512], 65536: LONG[65536]}, "T={T},I={width}"),
)
