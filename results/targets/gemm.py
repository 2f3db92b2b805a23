"""Targets of gemm, and of fp8, weight-only and gate-up products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

import torch
from targets.measures import (
    Own,
    against_library,
    answer,
    bandwidth_shares,
    best_of,
    cases_of,
    contenders,
    dispatched,
    latencies,
    launched,
    measure,
    of_bandwidth,
    optimized,
    peak_figures,
    unmeasured,
    without_bandwidth,
)
from targets.target import AcceptanceTarget, target

from rooflab.bench.core.running import Running
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.bench.tune.tune import tune_op
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

LAYERS_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""The pairs (N, K) of Llama-3-8B: q|k|v, o, gate|up, down, vocabulary."""
LAYERS_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
"""The pairs (N, K) of Llama-3-70B, without the vocabulary."""
PREFILL_ROWS = 2048
SKINNY_ROWS = (1, 2, 4, 8, 16, 32, 64)
# The lower rungs of the ladder take seconds for each of these cases; they are timed on the models' shapes.
LARGE_RUNGS = ("pipelined", "tma", "persistent", "warp_specialized", "cooperative", "multicast")
SKINNY_RUNGS = ("pipelined", "split_k", "stream_k", "gemv", "swap_ab", "tma")


def _case(M: int, N: int, K: int) -> str:
    return f"M={M},N={N},K={K},layout=NT,bias=false"


LARGE = tuple(
    dict.fromkeys(
        (
            _case(4096, 4096, 4096),
            *(_case(8192, 8192, K) for K in (512, 1024, 2048, 4096, 8192, 16384)),
            *(_case(PREFILL_ROWS, N, K) for N, K in (*LAYERS_8B[:4], *LAYERS_70B)),
        )
    )
)
SKINNY = tuple(_case(M, N, K) for N, K in LAYERS_8B for M in SKINNY_ROWS)


def skinny(
    context: Context, op: str, cases: Sequence[str], geomean: float, slow_geomean: float, slow_share: float, own: Own
) -> EntryOutcome:
    """Compares the kernels that a launcher takes with the library: over all cases, and over those with a slow library.

    A slow library is below `slow_share` of the read bandwidth measured on this card; `slow_geomean` is required there.
    """
    wanted = cases_of(context, op, cases)
    needed = f"geomean >= {geomean:.2f}, >= {slow_geomean:.2f} where the library is under {slow_share:.0%} of bandwidth"
    records, cut = measure(context, op, contenders(context, op, SKINNY_RUNGS), wanted, "bf16")
    best = dispatched(op, records, wanted)
    taken = best if context.dry_run else launched(op, records, wanted, own)
    if best is None or taken is None:
        return unmeasured(records, cut, needed)
    library = next((str(record.kernel) for record in records if record.role == "library"), "")
    shares = bandwidth_shares(records, "read").get(library, {})
    slow = [case for case, share in shares.items() if share < slow_share]
    slow_mean = geometric_mean(taken.by_case[case] for case in slow) if slow else None
    figures = taken.figures | best_of(best) | {"cases where the library is slow": len(slow), "geomean there": slow_mean}
    met = taken.geomean >= geomean and (slow_mean is None or slow_mean >= slow_geomean)
    figures |= peak_figures(records, taken)
    return answer(context, met, needed, figures, without_bandwidth(records))


_FP8_CASES = (
    "M=4096,N=4096,K=4096,scales=tensor,bias=false",
    "M=8192,N=8192,K=8192,scales=tensor,bias=false",
    "M=8192,N=8192,K=16384,scales=tensor,bias=false",
    *(f"M=2048,N={N},K={K},scales=tensor,bias=false" for N, K in LAYERS_8B[:4]),
)
_PER_TOKEN = "M=1,N=8192,K=8192"
NEAR_ZERO = 10
"""One output in this many, the nearest to zero, counts as near zero."""
_LONGEST = "M=2048,N=4096,K=16384,scales=tensor,bias=false"


def within(context: Context, op: str, case: str, scheme: str, limits_us: Mapping[str, float]) -> EntryOutcome:
    """Compares the best optimized kernel's time on one case with the limit of the card whose name contains the key."""
    (wanted,) = cases_of(context, op, [case])
    needed = ", ".join(f"at most {limit:g} us on {card}" for card, limit in limits_us.items())
    records, cut = measure(context, op, optimized(context, op), [wanted], scheme)
    own = {str(record.kernel) for record in records if record.role == "optimized"}
    found = {name: times[wanted.id] * 1e3 for name, times in latencies(records).items() if name in own}
    if not found:
        return unmeasured(records, cut, needed)
    best = min(found, key=lambda name: found[name])
    figures = {"kernel": best, "time_us": found[best]}
    card = next((str((record.environment.get("gpu") or {}).get("name")) for record in records), "")
    limit = next((limit for name, limit in limits_us.items() if name in card), None)
    lacks = "" if limit is not None else f"the target names no limit for {card or 'this device'}"
    return answer(context, limit is not None and found[best] <= limit, needed, figures, lacks)


def errors(found: torch.Tensor, oracle: torch.Tensor) -> dict[str, float]:
    """The root mean square error over all outputs and over the tenth nearest to zero, and the largest error.

    Large outputs differ most by their own rounding, which hides sums that differ by less.  The emulator has an fp8
    accumulator as short as Hopper's.  There, one sum over K = 16384 errs by 1.9 to 2.1 times as much as in fp32 over
    all outputs and by 12 times near zero; with promotion every 128 of K the factors are 1.0 and 1.5.
    """
    off, size = (found.double() - oracle).abs().flatten(), oracle.abs().flatten()
    near_zero = size <= size.kthvalue(-(-size.numel() // NEAR_ZERO)).values
    return {
        "mean square error": off.square().mean().sqrt().item(),
        "mean square error near zero": off[near_zero].square().mean().sqrt().item(),
        "largest error": off.max().item(),
    }


def accumulated(context: Context, op: str, case: str, scheme: str, most: float) -> EntryOutcome:
    """Compares the accuracy of sums: each of an optimized kernel's `errors` over that of the naive kernel's fp32 sums.

    Both errors also contain the rounding of the output, against the fp64 oracle.  Every kernel that takes the case must
    stay within `most`, because an engine may choose any of them.
    """
    device, spec = torch.device(context.device), registry.get_op(op)
    wanted = spec.get_cases("smoke")[1] if context.dry_run else spec.check_case(Case.parse(case))
    inputs = spec.make_inputs(wanted, get_scheme(scheme), device, context.seed)
    (oracle,) = spec.oracle(inputs)
    fp32 = errors(registry.get_kernel(op, "naive")(**inputs), oracle)
    found: dict[str, float] = {}
    refused: list[str] = []
    for kernel in optimized(context, op):
        reason = kernel.why_not_here(device) or kernel.why_not_args(inputs)
        if reason:
            refused.append(f"{kernel.id}: {reason}")
            continue
        Running.note([kernel.id])
        own = errors(kernel(**inputs), oracle)
        found |= {f"{kernel.name}: {what} over fp32's": off / fp32[what] for what, off in own.items()}
    Running.note(())
    needed = f"at most {most:g} times the error of fp32 sums"
    if not found or context.dry_run:
        why = "dry run" if context.dry_run else "; ".join(refused) or "no optimized kernel was found right at first"
        return EntryOutcome("DONE", why, "UNMEASURED", needed, found)
    return EntryOutcome(
        "DONE", "", "MET" if all(ratio <= most for ratio in found.values()) else "MISSED", needed, found
    )


def searched(context: Context, op: str, kernel: str, cases: Sequence[str], scheme: str) -> EntryOutcome:
    """Searches the configs of one kernel on these cases, in the time that is left."""
    report = tune_op(
        op,
        [kernel],
        cases=[case.id for case in cases_of(context, op, cases)],
        scheme=None if context.dry_run else scheme,
        budget_s=1.0 if context.dry_run else 0.8 * context.left_s,
        device=context.device,
        out=context.out,
        dry_run=context.dry_run,
        seed=context.seed,
    )
    figures = {f"{result.kernel} {result.bucket}": result.summary for result in report.results}
    return EntryOutcome("DONE", report.stopped, figures=figures)


TARGETS = (
    target(
        "gemm.bf16_large",
        "bf16 large (4096^3, 8192^3, 8192x8192xK for K 512 to 16384, Llama-3-8B and 70B prefill shapes): geomean >= "
        "1.00x cuBLAS in the faster of its two math modes, worst >= 0.93x",
        against_library,
        cost_s=60.0, value=84.0, cases=list(LARGE), geomean=1.0, worst=0.93, rungs=list(LARGE_RUNGS),
        own=[("cooperative", None)],
    ),
    target(
        "gemm.bf16_skinny",
        "skinny bf16 (Llama-3-8B's five layer shapes, M 1 to 64): geomean >= 1.00x cuBLAS, and >= 1.05x where cuBLAS "
        "is under 90% of measured read bandwidth",
        skinny,
        cost_s=70.0, value=83.0, cases=list(SKINNY), geomean=1.0, slow_geomean=1.05, slow_share=0.9,
        own=[("gemv", 4), ("swap_ab", None)],
    ),
    target(
        "gemm_fp8.large",
        "fp8 large: geomean >= 1.00x torch._scaled_mm(use_fast_accum=False), promoted every 128 of K",
        against_library,
        cost_s=40.0, value=82.0, cases=list(_FP8_CASES), geomean=1.0, scheme="fp8_e4m3",
        own=[("promoted_ws", None)],
    ),
    target(
        "gemm_fp8.error",
        "fp8 large: error at most twice fp32 accumulation's at K = 16384",
        accumulated,
        cost_s=20.0, value=81.0, case=_LONGEST, scheme="fp8_e4m3", most=2.0,
    ),
    target(
        "gemm_w4a16.gemv",
        "w4a16, 8192 x 8192, M = 1: at most 19 us on an H100 and 14 us on an H200",
        within,
        cost_s=20.0, value=87.0, case=f"{_PER_TOKEN},zeros=false,bias=false", scheme="w4a16_g128",
        limits_us={"H100": 19.0, "H200": 14.0},
    ),
    target(
        "gemm_w8a16.gemv",
        "w8a16, 8192 x 8192, M = 1: at least 75% of measured read bandwidth",
        of_bandwidth,
        cost_s=20.0, value=86.5, least={f"{_PER_TOKEN},bias=false": 0.75}, scheme="w8a16",
        own="gemv", access="read",
    ),
    target(
        "gemm_silu_and_mul.fused",
        "fused gate-up: geomean >= 1.05x the two library calls, prefill of Llama-3-8B and decode",
        against_library,
        cost_s=35.0, value=75.0, cases=[f"M={M},I=14336,K=4096,layout=NT" for M in (16, 64, 2048, 8192)], geomean=1.05,
        own=[("fused", 64), ("cooperative", None)],
    ),
    AcceptanceTarget(
        "search:gemm.cooperative", "configs of gemm/cooperative searched at a large and at a small K",
        searched,
        {"op": "gemm", "kernel": "cooperative", "cases": [_case(8192, 8192, 8192), _case(8192, 8192, 512)],
         "scheme": "bf16"}, 98.0, 74.9, ("gemm",), searches=True,
    ),
)  # fmt: skip
