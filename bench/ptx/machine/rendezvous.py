"""Whether lanes may execute an instruction of a whole warp while others of the warp are elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.text.syntax import Immediate, Instruction, Register

WITH_MASK = ("shfl.sync", "vote.sync", "match", "redux.sync", "bar.warp.sync", "elect.sync")


def may_run(context: Context, instruction: Instruction) -> bool:
    """Whether all the lanes that its member masks name, and that have not ended, are in the context."""
    if instruction.opcode.startswith("activemask"):
        return True
    if not instruction.opcode.startswith(WITH_MASK):
        return False
    mask = member_mask(context, instruction)
    group = context.group
    for warp in np.unique(context.warps):
        first = int(warp) * 32
        own = context.lanes[context.warps == warp]
        wanted = mask if isinstance(mask, int) else int(np.bitwise_or.reduce(mask[context.warps == warp]))
        named = {first + bit for bit in range(32) if wanted >> bit & 1 and group.alive[first + bit]}
        if not named <= set(map(int, own)):
            return False
    return True


def member_mask(context: Context, instruction: Instruction) -> Any:
    """The last operand of an instruction with a member mask: an integer, or one for each lane."""
    operand = instruction.operands[-1]
    if isinstance(operand, Immediate):
        return operand.value & 0xFFFFFFFF
    assert isinstance(operand, Register)
    value = context.registers[operand.index]
    if isinstance(value, np.generic):
        return int(value.view(np.uint32)) if value.dtype.itemsize == 4 else int(value)
    return value.view(np.uint32)
