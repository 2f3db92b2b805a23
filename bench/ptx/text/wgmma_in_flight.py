"""Registers that a wgmma still reads: A in registers must stay as it is until the group is waited for.

PTX ISA 8.7, `wgmma.mma_async`: accessing a register of a pending operation is undefined.  A wgmma reads A when it comes
to it, a loop puts the next step's A into the same registers, and nothing but `wgmma.wait_group` says that the last one
has been read.  That is a matter of the text alone, so it is looked for there, on every way.
"""

from __future__ import annotations

from rooflab.bench.ptx.text.flow import Flow
from rooflab.bench.ptx.text.syntax import Group, Instruction, registers_of
from rooflab.bench.ptx.text.uses import definitions

_Ages = dict[int, tuple[int, int]]
"""By register: how many groups have been committed since, its own included, and the wgmma that reads it."""


def rewritten(flow: Flow) -> list[tuple[Instruction, Instruction]]:
    """Each write of a register that a wgmma before it may still have to read as A, with that wgmma."""
    kernel = flow.kernel
    if not any(_a_registers(instruction) for instruction in kernel.instructions):
        return []
    blocks = {start: flow.block(start, 128) for start in sorted(flow.starts(128))}
    entering: dict[int, _Ages] = {start: {} for start in blocks}
    found: dict[tuple[int, int], tuple[Instruction, Instruction]] = {}
    work, seen = [0], set[int]()
    while work:
        start = work.pop()
        seen.add(start)
        ages = dict(entering[start])
        for instruction in kernel.instructions[blocks[start].start : blocks[start].end]:
            for number in _step(instruction, ages):
                found.setdefault((instruction.number, number), (instruction, kernel.instructions[number]))
        for following in blocks[start].following:
            if following not in blocks:
                continue
            known = entering[following]
            # The youngest counts: on that way the most groups may be pending.
            younger = {index: age for index, age in ages.items() if index not in known or age < known[index]}
            if younger or following not in seen:
                known.update(younger)
                work.append(following)
    return list(found.values())


def _a_registers(instruction: Instruction) -> list[int]:
    if not instruction.opcode.startswith("wgmma.mma_async") or not isinstance(instruction.operands[1], Group):
        return []
    return [register.index for register in registers_of(instruction.operands[1])]


def _step(instruction: Instruction, ages: _Ages) -> set[int]:
    """Takes `ages` past an instruction; the wgmmas whose A it writes too early."""
    if instruction.opcode.startswith("wgmma.mma_async"):
        ages.update(dict.fromkeys(_a_registers(instruction), (0, instruction.number)))
        return set()
    if instruction.opcode.startswith("wgmma.commit_group"):
        ages.update({index: (age + 1, number) for index, (age, number) in ages.items()})
        return set()
    if instruction.opcode.startswith("wgmma.wait_group"):
        pending = int(getattr(instruction.operands[0], "value", 0))
        for index in [index for index, (age, _) in ages.items() if age > pending]:
            del ages[index]
        return set()
    written = {register.index for register in definitions(instruction)} & ages.keys()
    return {ages.pop(index)[1] for index in written}
