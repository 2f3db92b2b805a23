"""Bars of gemm: large products against cuBLAS, and a decode step's skinny ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rooflab.bench.suite.bars import AGAINST_LIBRARY, bar
from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.suite.measures import (
    answer,
    bandwidth_shares,
    contenders,
    dispatched,
    measure,
    peak_figures,
    unmeasured,
)
from rooflab.kernels import registry
from rooflab.reference.spec import Case

LAYERS_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""N and K of Llama-3-8B: q|k|v, o, gate|up, down, vocabulary."""
LAYERS_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
"""The same of Llama-3-70B, without the vocabulary."""
PREFILL_ROWS = 2048
SKINNY_ROWS = (1, 2, 4, 8, 16, 32, 64)
# The lower rungs of the ladder take seconds for a case here, and are timed on the models' shapes.
LARGE_RUNGS = ("pipelined", "tma", "persistent", "warp_specialized", "cooperative")
SKINNY_RUNGS = ("pipelined", "split_k", "stream_k", "gemv", "swap_ab")


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


def skinny(context: Context, cases: Sequence[str], geomean: float, slow_geomean: float, slow_share: float) -> Outcome:
    """The best rung of each bucket of rows against the library: over all cases, and where the library is slow.

    Slow is under `slow_share` of the bandwidth measured on this card; there `slow_geomean` is wanted.
    """
    wanted = [registry.get_op("gemm").check_case(Case.parse(text)) for text in cases]
    if context.dry_run:
        wanted = list(registry.get_op("gemm").get_cases("smoke")[:1])
    needed = f"geomean >= {geomean:.2f}, >= {slow_geomean:.2f} where the library is under {slow_share:.0%} of bandwidth"
    records, run_id, cut = measure(context, "gemm", contenders(context, "gemm", SKINNY_RUNGS), wanted, "bf16")
    best = dispatched("gemm", records, wanted)
    files = (f"{run_id}.jsonl",)
    if best is None:
        return unmeasured(records, cut, needed, run_id)
    library = next((str(record.kernel) for record in records if record.role == "library"), "")
    shares = bandwidth_shares(records).get(library, {})
    slow = [case for case, share in shares.items() if share < slow_share]
    slow_mean = math.exp(sum(math.log(best.by_case[case]) for case in slow) / len(slow)) if slow else None
    figures = {"kernel": best.kernel, "geomean": best.geomean, "worst": best.worst, "worst case": best.worst_case}
    figures |= {"cases where the library is slow": len(slow), "geomean there": slow_mean}
    figures |= peak_figures(records, best)
    kinds = {str((record.ceilings or {}).get("kind")) for record in records}
    if kinds != {"measured"} and not context.dry_run:
        return Outcome("DONE", "no bandwidth was measured on this card", "UNMEASURED", needed, figures, files)
    met = best.geomean >= geomean and (slow_mean is None or slow_mean >= slow_geomean)
    return answer(context, met, needed, figures, run_id)


BARS = (
    bar(
        "gemm.bf16_large",
        "bf16 large (4096^3, 8192^3, 8192x8192xK for K 512 to 16384, Llama-3-8B and 70B prefill shapes): geomean >= "
        "1.00x cuBLAS, worst >= 0.93x",
        ("gemm",),
        AGAINST_LIBRARY,
        {"op": "gemm", "cases": list(LARGE), "geomean": 1.0, "worst": 0.93, "rungs": list(LARGE_RUNGS)},
        cost_s=60.0,
        value=80.0,
    ),
    bar(
        "gemm.bf16_skinny",
        "skinny bf16 (Llama-3-8B's five layer shapes, M 1 to 64): geomean >= 1.00x cuBLAS, and >= 1.05x where cuBLAS "
        "is under 90% of measured read bandwidth",
        ("gemm",),
        f"{__name__}:skinny",
        {"cases": list(SKINNY), "geomean": 1.0, "slow_geomean": 1.05, "slow_share": 0.9},
        cost_s=60.0,
        value=78.0,
    ),
)
