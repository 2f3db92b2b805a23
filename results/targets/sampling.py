"""Targets of sampling from a whole vocabulary: reads of the logits at a copy's bandwidth, torch's sort, FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from targets.gemm import within
from targets.measures import answer, cases_of, contenders, latencies, measure, unmeasured, without_bandwidth
from targets.target import target

from rooflab.bench.suite.entries import Context, EntryOutcome

CUTS = ("top_k=50,top_p=1.0", "top_k=0,top_p=0.95", "top_k=50,top_p=0.95")
CASE = "B={B},V=128256,temperature=1.0,{cut},min_p=0.0,sigma={sigma}"


def reads(
    context: Context, op: str, cases: Sequence[str], scheme: str, most: float, over_library: float
) -> EntryOutcome:
    """The best rung of each case: the number of times that a copy would have read the logits in its time, at most
    `most`; its speed relative to torch, at least `over_library`; and relative to the best peer, at least 1."""
    wanted = cases_of(context, op, cases)
    needed = f"at most {most:g} reads at a copy's bandwidth, {over_library:g} times torch's speed, no peer faster"
    records, cut = measure(context, op, contenders(context, op), wanted, scheme)
    times, roles = latencies(records), {str(record.kernel): str(record.role) for record in records}
    figures: dict[str, object] = {}
    met = True
    for case in wanted:
        best = dict.fromkeys(("optimized", "library", "peer"), inf)
        for name, ms in times.items():
            best[roles[name]] = min(best[roles[name]], ms.get(case.id, inf))
        own = best["optimized"]
        if inf in (own, best["library"]):
            return unmeasured(records, cut, needed)
        record = next(r for r in records if r.case_id == case.id and r.latency_median_ms == own)
        rates = (record.ceilings or {}).get("access_bytes_per_s") or {}
        passes = own * 1e-3 * float(rates.get("copy", inf)) / (record.least_bytes or inf)
        torch_s, peer_s = best["library"] / own, best["peer"] / own
        figures[case.id] = (
            f"{record.kernel}: {own * 1e3:.0f} us, {passes:.2f} reads, {torch_s:.1f} times torch's speed, {peer_s:.2f} "
            "times the best peer's"
        )
        met = met and passes <= most and torch_s >= over_library and peer_s >= 1
    return answer(context, met, needed, figures, without_bandwidth(records))


TARGETS = (
    target(
        "sample.reads",
        "sample fp32, 512 rows of 128,256 normal logits of sigma 1 and 2.5, top-k, top-p and both: at most 3 reads at "
        "a copy's bandwidth, at least 3x torch's sort, at least FlashInfer's speed if it is there; sigma 2.5 stands "
        "for a model's logits, of which no dump is kept",
        reads,
        cost_s=230.0,
        value=73.9,
        scheme="fp32",
        most=3.0,
        over_library=3.0,
        cases=[CASE.format(B=512, cut=cut, sigma=sigma) for sigma in (1.0, 2.5) for cut in CUTS],
    ),
    target(
        "sample.one_row",
        "sample fp32, one row of 128,256 normal logits of sigma 2.5, top-k and top-p: at most 20 us",
        within,
        cost_s=20.0,
        value=73.8,
        scheme="fp32",
        case=CASE.format(B=1, cut=CUTS[2], sigma=2.5),
        limits_us={"H100": 20.0, "H200": 20.0},
    ),
)
