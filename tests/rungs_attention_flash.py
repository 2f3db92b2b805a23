"""The Triton rungs of flash_attention: in which respect each one's code differs from that of the rung below."""

from __future__ import annotations

import re

from rung_claims import code, loop, rung

from rooflab.bench.compile.flow import Loop
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, Request, compile_kernels
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case

TILE = (128, 64, 8, 2)
"""Query and key tile, warps and stages: the same for two rungs that are compared by their counts."""
LONG = Case(B=1, T=2048, S=2048, H=32, H_kv=8, D=128, causal=True)


def _with_tile(name: str, case: Case = LONG) -> CompiledInfo:
    config = get_kernel("flash_attention", name).tuning.config_type(*TILE)
    (found,) = compile_kernels([Request("flash_attention", name, case, SCHEMES["bf16"], config=config)])
    assert not isinstance(found, CompileFailure), found
    return found[0]


def _key_loops(info: CompiledInfo) -> tuple[Loop, Loop]:
    """The loop over whole tiles of keys and that over cut ones, by how many values they select."""
    found = [body for body in info.loops if body.innermost and body.counts["wgmma"]]
    assert len(found) == 2 and not any(body.counts["spill_load"] + body.counts["spill_store"] for body in found)
    plain, masked = sorted(found, key=_selects)
    return plain, masked


def _selects(body: Loop) -> int:
    return sum(entry.opcode.startswith("FSEL") for entry in body.instructions)


def _waits_once(body: Loop) -> bool:
    """Whether the products of a step are asked for in one go: the last of them is still running in the next step."""
    return sum(entry.opcode.startswith("WARPGROUP.DEPBAR") for entry in body.instructions) == 1


@rung("flash_attention/masked_tiles")
def flash_attention_masked_tiles() -> None:
    """The loop over whole tiles selects nothing and takes two thirds of online's instructions, of equal tiles."""
    below, info = _with_tile("online"), _with_tile("masked_tiles")
    plain, masked = _key_loops(info)
    assert _selects(plain) == 0 < 32 < _selects(masked) and _selects(loop(below)) > 32
    assert len(plain.instructions) < 0.7 * len(loop(below).instructions)
    assert plain.counts["wgmma"] == masked.counts["wgmma"] == loop(below).counts["wgmma"] and _waits_once(plain)


@rung("flash_attention/tma")
def flash_attention_tma() -> None:
    """One bulk copy each for keys and values in a step, where cp.async is an instruction for 16 bytes of each thread;
    fewer registers and instructions, of equal tiles."""
    below, info = _with_tile("masked_tiles"), _with_tile("tma")
    (plain_below, _), (plain, masked) = _key_loops(below), _key_loops(info)
    assert plain_below.counts["cp_async"] == 8 and plain_below.counts["tma"] == 0
    assert plain.counts["tma"] == masked.counts["tma"] == 2 and info.uses_tma
    assert info.counts["cp_async"] == info.counts["global_load"] == 0
    assert len(plain.instructions) < len(plain_below.instructions) and info.registers < below.registers
    assert _selects(plain) == 0 and _waits_once(plain) and _waits_once(masked)


@rung("flash_attention/packed_gqa")
def flash_attention_packed_gqa() -> None:
    """A short query has a CTA for each head of keys, not of queries, of half the rows; the loop is tma's own."""
    short = LONG.but(T=16)
    found = compile_kernels([Request("flash_attention", n, short, SCHEMES["bf16"]) for n in ("tma", "packed_gqa")])
    assert not any(isinstance(item, CompileFailure) for item in found), found
    (below,), (info,) = found
    assert below.grid[0] == 32 and info.grid[0] == 8 and (below.threads, info.threads) == (256, 128)
    assert all(_waits_once(body) and body.counts["tma"] == 2 for body in _key_loops(info))
    one, other = (_key_loops(code("flash_attention", name))[0] for name in ("tma", "packed_gqa"))
    assert one.counts == other.counts and _selects(other) == 0


@rung("flash_attention/persistent")
def flash_attention_persistent() -> None:
    """As many CTAs as SMs, in a loop around tma's; what that costs is registers, and no spill in a loop of keys."""
    below, info = code("flash_attention", "tma"), code("flash_attention", "persistent")
    assert info.grid[0] == 132 < below.grid[0]
    outer = [body for body in info.loops if not body.innermost and body.counts["wgmma"]]
    assert len(outer) == 1 and not any(not body.innermost and body.counts["wgmma"] for body in below.loops)
    (plain_below, _), (plain, masked) = _key_loops(below), _key_loops(info)
    assert plain.counts["wgmma"] == plain_below.counts["wgmma"] and _waits_once(plain) and _waits_once(masked)
    assert _selects(plain) == 0 and set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", info.ptx)) == {"0"}
