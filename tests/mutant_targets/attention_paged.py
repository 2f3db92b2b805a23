"""Attention through a block table."""

from __future__ import annotations

from mutant_targets.target import BARRIERS, Target


def _chunked(H: int, queries: int, context: int, windows: tuple[int, int], m: int, warps: int) -> Target:
    # The second sequence's one query meets no diagonal, and the narrow window leaves no block whole: what a loop has
    # not waited for then meets no wait of the next.
    case = f"B=2,context={context},H={H},H_kv=1,D=64,block_size=16,ragged=false,queries={queries},mixed=true"
    config = {"block_m": m, "block_n": 16, "num_warps": warps, "num_stages": 3}
    return Target("paged_attention", "chunked", tuple(f"{case},window={window}" for window in windows), config)


TARGETS: dict[str, Target] = {
    # Three shares of 7 units: each has a part of a sequence, and one a whole one.
    "paged_split_kv": Target(
        "paged_attention", "split_kv", ("B=2,context=100,H=4,H_kv=2,D=64,block_size=16,ragged=true,lse=true",),
        {"warps": 2, "num_stages": 3, "ctas_per_sm": 1, "least": 3},
        ("0: drop cp.async.wait_group 1", "0: one more pending in cp.async.wait_group 1"),
    ),
    "chunked_wgmma": _chunked(4, 33, 240, (110, 30), 128, 8),
    "chunked_mma": _chunked(1, 40, 176, (96, 32), 32, 4),
    # Three tiles on one SM; the diagonal of one ends blocks before its sequence does.
    "tma_pages": Target(
        "paged_attention", "tma_pages",
        ("B=2,context=490,H=1,H_kv=1,D=64,block_size=32,ragged=false,queries=200,mixed=true,window=200",),
        {"block_n": 64, "stages": 2},
        # What a page has past its sequence's end is waited for, and put to zero, before it is given away.
        ("do not wait in mbarrier.try_wait 19", "drop fence.proxy.async 4"),
        (("sms", 1), ("without", BARRIERS)),
    ),
}  # fmt: skip
