"""flash_attention/ping_pong: two tiles on one SM, rings of two slots round several times."""

from __future__ import annotations

from mutant_targets.target import BARRIERS, Target

TARGETS = {
    "flash_ping_pong": Target(
        "flash_attention", "ping_pong", ("B=1,T=136,S=280,H=1,H_kv=1,D=64,causal=true,lse=true",),
        {"block_n": 64, "stages": 2},
        ("do not wait in mbarrier.try_wait 5", "one more pending in wgmma.wait_group 3"),
        (("sms", 1), ("without", BARRIERS)),
    ),
    # The result is staged where the queries were.
    "flash_ping_pong_256": Target(
        "flash_attention", "ping_pong", ("B=1,T=40,S=200,H=2,H_kv=1,D=256,causal=false",),
        {"block_n": 64, "stages": 2}, (), (("sms", 1), ("without", BARRIERS)),
    ),
}  # fmt: skip
