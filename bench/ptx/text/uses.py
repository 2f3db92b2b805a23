"""Which registers an instruction reads and which it writes."""

from __future__ import annotations

from collections.abc import Iterator

from rooflab.bench.ptx.text.syntax import Address, Group, Instruction, Operand, Register, registers_of

NO_RESULT = frozenset(
    "st bra brx ret exit trap bar barrier fence membar red wgmma_wait cp prefetch prefetchu setmaxnreg nanosleep call"
    " stmatrix discard applypriority tensormap griddepcontrol pmevent brkpt isspacep_none stackrestore".split()
)
"""Families that write no register."""


def definitions(instruction: Instruction) -> list[Register]:
    """The registers that it writes."""
    return [register for operand in _results(instruction) for register in registers_of(operand)]


def uses(instruction: Instruction) -> list[Register]:
    """The registers that it reads, its predicate included; those of an accumulator are read and written."""
    found = [] if instruction.predicate is None else [instruction.predicate]
    # By place, because a register may stand on both sides.
    for operand in instruction.operands[1 if any(True for _ in _results(instruction)) else 0 :]:
        found += registers_of(operand)
    if instruction.opcode.startswith("wgmma.mma_async"):
        found += registers_of(instruction.operands[0])
    return found


def _results(instruction: Instruction) -> Iterator[Operand]:
    name, operands = instruction.opcode.split(".", 1)[0], instruction.operands
    if name in NO_RESULT or not operands:
        return
    if name == "wgmma" and not instruction.opcode.startswith("wgmma.mma_async"):
        return
    if name == "mbarrier" and isinstance(operands[0], Address):
        return  # init, inval, expect_tx, complete_tx
    first = operands[0]
    if isinstance(first, Address):
        return
    if isinstance(first, Register | Group):
        yield first
