"""Targets of attention: prefill against the library's best backend, paged prefill against contiguous, paged decode and
cache writes against the card's bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from targets.measures import (
    against_library,
    answer,
    bandwidth_shares,
    cases_of,
    contenders,
    latencies,
    measure,
    of_bandwidth,
    optimized,
    unmeasured,
    why_unmeasured,
)
from targets.target import AcceptanceTarget, target

from rooflab.bench.core.record import Record
from rooflab.bench.suite.entries import Context, EntryOutcome

TOKENS = 16384
"""Tokens in all sequences of a case together, as in FlashAttention's own benchmark."""
LENGTHS = (1024, 2048, 4096, 8192, 16384)
HEADS = 2048
"""Query heads times head_dim, as in FlashAttention's own benchmark."""
# At head dims 64 and 256, the rungs below TMA are timed only on the models' shapes.
UPPER_RUNGS = ("tma", "persistent", "ping_pong")


def _prefill(D: int) -> list[str]:
    H = HEADS // D
    return [
        f"B={TOKENS // T},T={T},S={T},H={H},H_kv={H_kv},D={D},causal={causal}"
        for T in LENGTHS
        for H_kv in (H, max(1, H // 8))
        for causal in ("true", "false")
    ]


def _decode(B: int, context: int) -> str:
    return f"B={B},context={context},H=32,H_kv=8,D=128,block_size=16,ragged=false"


def ragged_lengths(context: Context, op: str, even: str, ragged: str, least: float) -> EntryOutcome:
    """The best bandwidth that a rung reaches with ragged lengths, over the best with even ones."""
    cases = cases_of(context, op, (even, ragged), dry=2)
    records, cut = measure(context, op, optimized(context, op), cases, "bf16")
    needed = f"ragged over even >= {least:.2f}"
    # Not the ratio of each rung: a rung that is slow on both cases could have the best ratio.
    both = {kernel: shares for kernel, shares in bandwidth_shares(records, "read").items() if len(shares) == len(cases)}
    if not both:
        return unmeasured(records, cut, needed)
    fastest, best = (max(both, key=lambda kernel: both[kernel][case.id]) for case in cases)
    ratio = both[best][cases[1].id] / both[fastest][cases[0].id]
    figures = {"kernel": best, "fastest with even lengths": fastest, "ragged over even": ratio}
    return answer(context, ratio >= least, needed, figures)


def paged_prefill(context: Context, op: str, pairs: Mapping[str, str], most: float) -> EntryOutcome:
    """The best paged rung's time over the best contiguous rung's, at the worst pair; `pairs` have equal work."""
    texts = {op: list(pairs), "flash_attention": list(pairs.values())}
    needed = f"paged over contiguous <= {most:.2f}"
    best: dict[str, dict[str, float]] = {}
    records: list[Record] = []
    cut = False
    for one, cases in texts.items():
        wanted = cases_of(context, one, cases, dry=len(cases))
        found, short = measure(context, one, optimized(context, one), wanted, "bf16")
        records, cut = [*records, *found], cut or short
        own = latencies(found)
        best[one] = {
            case.id: min((ms[case.id] for ms in own.values() if case.id in ms), default=0.0) for case in wanted
        }
    times = [list(own.values()) for own in best.values()]
    if not all(all(own) for own in times):
        return unmeasured(records, cut, needed)
    worst = max(paged / dense for paged, dense in zip(*times, strict=True))
    return answer(context, worst <= most, needed, {"paged over contiguous, worst": worst})


def fp8_prefill(context: Context, op: str, cases: Sequence[str], scheme: str) -> EntryOutcome:
    """Speedup of fp8 over the library's kernel, which dequantises to bf16 in the timed call; no target is set on it."""
    wanted = cases_of(context, op, cases)
    records, cut = measure(context, op, contenders(context, op), wanted, scheme)
    times = latencies(records)
    base = times.pop("library", {})
    figures = {
        f"{kernel} over library, geomean of {len(shared)}": geometric_mean([base[case] / own[case] for case in shared])
        for kernel, own in times.items()
        if (shared := base.keys() & own.keys())
    }
    reason = "" if figures and not cut else why_unmeasured(records)
    return EntryOutcome("PARTIAL" if cut else "DONE", reason, figures=figures)


RIVALS = ("sdpa_cudnn", "flash_attention_3")


def _against(
    id: str, D: int, geomean: float, own: str, cost_s: float, value: float, **rungs: list[str]
) -> AcceptanceTarget:
    return target(
        f"flash_attention.{id}",
        f"prefill d{D} bf16, 16k tokens in all, full and causal, seq 1k to 16k, MHA and GQA 8:1: geomean >= "
        f"{geomean:.2f}x the best SDPA backend; cuDNN and FlashAttention-3 beside it",
        against_library,
        cost_s=cost_s,
        value=value,
        cases=_prefill(D),
        geomean=geomean,
        own=[(own, None)],
        rivals=list(RIVALS),
        **rungs,
    )


TARGETS = (
    _against("prefill_d128", 128, 1.0, "ping_pong", 70.0, 85.0),
    target(
        "paged_attention.decode",
        "paged decode GQA 32/8 d128 bf16, block 16: >= 90% of measured read bandwidth at batch 64 and context 4k and "
        "8k, >= 70% at 1k, >= 60% for one request at 64k; beside it FlashAttention-3 with pages or FlexAttention",
        of_bandwidth,
        cost_s=45.0, value=89.0,
        least={_decode(64, 4096): 0.9, _decode(64, 8192): 0.9, _decode(64, 1024): 0.7, _decode(1, 65536): 0.6},
        own="split_kv", access="read", rivals=["flash_attention_3", "flashinfer", "flex"],
    ),
    target(
        "paged_attention.ragged",
        "paged decode with log-normal lengths, as many keys in all: within 3% of the bandwidth of even ones",
        ragged_lengths,
        cost_s=30.0, value=88.0, even=_decode(64, 4096), ragged=_decode(64, 4096) + ",lognormal=true", least=0.97,
    ),
    target(
        "paged_attention.prefill",
        "paged prefill within 5% of the contiguous kernel at block 16",
        paged_prefill,
        "flash_attention",
        cost_s=30.0, value=74.8, most=1.05,
        pairs={
            _decode(8, 2048) + ",queries=2048": "B=8,T=2048,S=2048,H=32,H_kv=8,D=128,causal=true",
            _decode(8, 8192) + ",queries=512": "B=8,T=512,S=8192,H=32,H_kv=8,D=128,causal=true",
        },
    ),
    target(
        "rope_and_cache.bandwidth",
        "fused rope and cache write at 4096 tokens: >= 85% of a copy's bandwidth",
        of_bandwidth,
        cost_s=15.0, value=86.0,
        least={
            "T=4096,H=32,H_kv=8,D=128,rotary=128,max_position=131072,num_blocks=512,block_size=16,skipped=0,"
            "interleaved=false": 0.85
        },
        own="fused", access="copy",
    ),
    AcceptanceTarget(
        "measure:flash_attention.fp8",
        "prefill d128 in fp8, 16k tokens in all, full and causal, seq 1k to 16k, MHA, keys of v contiguous: over the "
        "library's, which dequantises to bf16 in the timed call",
        fp8_prefill,
        {
            "op": "flash_attention",
            "scheme": "fp8_e4m3",
            "cases": [f"{case},v_columns=true" for case in _prefill(128) if f"H_kv={HEADS // 128}," in case],
        },
        40.0, 73.4, ("flash_attention",),
    ),
    _against("prefill_d64", 64, 0.95, "ping_pong", 45.0, 75.5, rungs=list(UPPER_RUNGS)),
    _against("prefill_d256", 256, 0.95, "persistent", 45.0, 75.0, rungs=list(UPPER_RUNGS)),
)  # fmt: skip
