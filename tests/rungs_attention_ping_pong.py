"""The top rung of flash_attention: what its compiled code shows over the rung below."""

from __future__ import annotations

import re

from rung_claims import code, rung

from rooflab.bench.compile.sass import Instruction


def _order(instructions: tuple[Instruction, ...]) -> list[str]:
    """What matters of a loop, each kind once where several of it follow each other."""
    kinds = {"HGMMA": "product", "MUFU": "exponential", "WARPGROUP.DEPBAR.LE": "wait", "F2FP": "rounding"}
    seen: list[str] = []
    for instruction in instructions:
        found = next((kind for name, kind in kinds.items() if instruction.opcode.startswith(name)), None)
        if found == "wait":
            found += instruction.operands.rstrip(" ;")[-1]
        if found and found not in seen[-1:]:
            seen.append(found)
    return seen


@rung("flash_attention/ping_pong")
def flash_attention_ping_pong() -> None:
    """The exponentials stand between the wait for the scores and that for the values' product, in a loop with neither
    a mask nor a load nor a spill, in warps that do nothing else; below, all warps do all of it."""
    below, info = code("flash_attention", "online"), code("flash_attention", "ping_pong")
    pending = r"wgmma\.wait_group\.sync\.aligned (\d)"
    assert not below.uses_warp_specialization and info.uses_warp_specialization
    assert "1" in re.findall(pending, info.ptx) and info.uses_tma and "setmaxnreg" in info.ptx and info.threads == 384
    loops = [loop for loop in info.loops if loop.innermost and loop.counts["wgmma"]]
    steady = [loop for loop in loops if not any(op.startswith("FSEL") for op in loop.opcodes)]
    assert len(loops) == 4 and len(steady) == 2, "for each consumer one with a mask and one without"
    for loop in steady:
        counts = loop.counts
        assert counts["global_load"] == counts["shared_load"] == counts["spill_load"] == counts["spill_store"] == 0
        # 128 columns of the scores, and of the result: 8 products of 16 columns of a head, and 8 of 16 keys.
        assert counts["wgmma"] == 16
        order = " ".join(_order(loop.instructions))
        assert re.fullmatch(r"product wait1( exponential| rounding)+ wait0", order), order
