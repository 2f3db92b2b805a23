"""Registers of wgmma in the text of a kernel: which hold accumulators, and which are touched without a fence after.

PTX ISA 8.7, `wgmma.fence`: it must stand before the first wgmma of a kernel, and between any other access of a register
and the wgmma that takes it, as an accumulator or as A.  That is a matter of the text alone, so it is looked for there,
on every way to each wgmma.
"""

from __future__ import annotations

from rooflab.bench.ptx.text.flow import Flow
from rooflab.bench.ptx.text.syntax import Group, Instruction, Kernel, registers_of
from rooflab.bench.ptx.text.uses import definitions, uses


def accumulators(kernel: Kernel) -> frozenset[int]:
    """Registers that a wgmma writes, and copies of them."""
    found: set[int] = set()
    copies: list[tuple[int, int]] = []
    for instruction in kernel.instructions:
        if instruction.opcode.startswith("wgmma.mma_async"):
            found |= {register.index for register in definitions(instruction)}
        elif instruction.opcode.startswith("mov") and len(instruction.operands) == 2:
            target, source = ([item.index for item in registers_of(operand)] for operand in instruction.operands)
            if len(target) == len(source) == 1:
                copies.append((target[0], source[0]))
    changed = bool(found)
    while changed:
        more = {target for target, source in copies if source in found} - found
        found |= more
        changed = bool(more)
    return frozenset(found)


def unfenced(flow: Flow) -> list[tuple[Instruction, Instruction | None]]:
    """Each wgmma that lacks a `wgmma.fence` on some way there, with what touches a register of its before it.

    That is a write, or a read behind a wgmma that had the register, with no fence since; a chain of wgmmas of one shape
    needs no fence.  None stands for the kernel's beginning, after which the first one needs a fence whatever its
    registers.
    """
    kernel = flow.kernel
    taken = {index for instruction in kernel.instructions for index in _registers(instruction)}
    if not taken:
        return []
    blocks = {start: flow.block(start, 128) for start in sorted(flow.starts(128))}
    entering: dict[int, _State] = {start: {} for start in blocks}
    entering[0][BEGINNING, 0] = -1
    found: dict[tuple[int, int], tuple[Instruction, Instruction | None]] = {}
    work = [0]
    seen: set[int] = set()
    while work:
        start = work.pop()
        seen.add(start)
        state = dict(entering[start])
        for instruction in kernel.instructions[blocks[start].start : blocks[start].end]:
            for number in _step(instruction, state, taken):
                other = kernel.instructions[number] if number >= 0 else None
                found.setdefault((instruction.number, number), (instruction, other))
        for following in blocks[start].following:
            if following not in blocks:
                continue
            known = entering[following]
            if state.keys() - known.keys() or following not in seen:
                known.update({key: number for key, number in state.items() if key not in known})
                work.append(following)
    return list(found.values())


BEGINNING, WRITTEN, MULTIPLIED, READ, FENCED = range(5)
"""What is known of a register since the last fence: the first of all registers alike."""
_State = dict[tuple[int, int], int]
"""By kind and register: the last instruction that did it."""


def _registers(instruction: Instruction) -> list[int]:
    """Accumulators and A of a wgmma."""
    if not instruction.opcode.startswith("wgmma.mma_async"):
        return []
    groups = [operand for operand in instruction.operands[:2] if isinstance(operand, Group)]
    return [register.index for operand in groups for register in registers_of(operand)]


def _step(instruction: Instruction, state: _State, taken: set[int]) -> set[int]:
    """Takes `state` past an instruction; what that instruction, if it is a wgmma, finds without a fence."""
    found: set[int] = set()
    if instruction.opcode.startswith("wgmma.fence"):
        # A compiler moves reads behind it: they count again behind the wgmma that it is for.
        had = {(FENCED, index): number for (kind, index), number in state.items() if kind in (MULTIPLIED, FENCED)}
        state.clear()
        state.update(had)
    elif instruction.opcode.startswith("wgmma.mma_async"):
        own = _registers(instruction)
        keys = [(BEGINNING, 0), *((kind, index) for kind in (WRITTEN, READ) for index in own)]
        found = {state[key] for key in keys if key in state}
        for kind, index in [key for key in state if key[0] == FENCED]:
            state[MULTIPLIED, index] = state.pop((kind, index))
        for index in own:
            state[MULTIPLIED, index] = instruction.number
            state.pop((READ, index), None)
    elif not instruction.opcode.startswith("wgmma"):
        for register in uses(instruction):
            if (MULTIPLIED, register.index) in state:
                state[READ, register.index] = instruction.number
        # LLVM ties a wgmma's operands to its registers by moves, also behind a fence; ptxas then moves the fence (its
        # note C7519). So a move counts only where the fence was before another wgmma, or where there was none.
        moves = instruction.parts[0] == "mov" and (BEGINNING, 0) not in state
        for register in definitions(instruction):
            if register.index in taken and not (moves and (MULTIPLIED, register.index) not in state):
                state[WRITTEN, register.index] = instruction.number
    return found
