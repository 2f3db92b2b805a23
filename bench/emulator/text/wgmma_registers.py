"""Finds the accumulators of wgmma in a kernel's text, and accesses of wgmma registers without a fence or wait.

A kernel needs a fence before its first wgmma, and between a register's access and a wgmma that uses the register (PTX
ISA 8.7, `wgmma.fence`).  An access of a pending wgmma's registers is undefined until a `wgmma.wait_group` (PTX ISA 8.7,
`wgmma.mma_async`).  Both rules depend on the text alone, so this module checks every path through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rooflab.bench.emulator.text.flow import Flow
from rooflab.bench.emulator.text.syntax import Instruction, OperandGroup, PtxKernel, definitions, registers_of, uses

_Facts = TypeVar("_Facts", bound=dict[Any, Any])
"""Facts that hold at one point of a kernel."""
KERNEL_START, REG_WRITE, REG_WGMMA, REG_READ, FENCED = range(5)
"""What can happen to a register since the last fence; `KERNEL_START` concerns all registers."""
_EventState = dict[tuple[int, int], int]
"""By event and register, the number of the last instruction that caused the event."""
_GroupAges = dict[int, tuple[int, int]]
"""By register: the groups committed since a wgmma that reads it, with this wgmma's group; and this wgmma's number."""


def accumulators(kernel: PtxKernel) -> frozenset[int]:
    """Returns the registers that a wgmma writes, and all registers to which a `mov` copies their values."""
    registers: set[int] = set()
    copy_pairs: list[tuple[int, int]] = []
    for instruction in kernel.instructions:
        if instruction.opcode.startswith("wgmma.mma_async"):
            registers |= {register.index for register in definitions(instruction)}
        elif instruction.opcode.startswith("mov") and len(instruction.operands) == 2:
            target, source = ([item.index for item in registers_of(operand)] for operand in instruction.operands)
            if len(target) == len(source) == 1:
                copy_pairs.append((target[0], source[0]))
    has_changed = bool(registers)
    while has_changed:
        new_registers = {target for target, source in copy_pairs if source in registers} - registers
        registers |= new_registers
        has_changed = bool(new_registers)
    return frozenset(registers)


def unfenced(flow: Flow) -> list[tuple[Instruction, Instruction | None]]:
    """Finds wgmmas that lack a `wgmma.fence` on some path through the kernel.  Returns pairs of a wgmma and an earlier
    instruction that makes the fence necessary.

    The earlier instruction writes a register of the wgmma, or reads a register that a previous wgmma used.  It is None
    if a path from the kernel's start to the wgmma has no fence.  Consecutive wgmmas of one shape need no fence between
    them."""
    kernel = flow.kernel
    used_registers = {used_register for instruction in kernel.instructions for used_register in _registers(instruction)}
    if not used_registers:
        return []
    conflicts = _follow(
        flow,
        {(KERNEL_START, 0): -1},
        lambda instruction, state: _step(instruction, state, used_registers),
        lambda state, earlier: {event_id: op_index for event_id, op_index in state.items() if event_id not in earlier},
    )
    return [(wgmma, kernel.instructions[op_index] if op_index >= 0 else None) for wgmma, op_index in conflicts]


def _follow(
    flow: Flow, entry: _Facts, step: Callable[[Instruction, _Facts], set[int]], new: Callable[[_Facts, _Facts], _Facts]
) -> list[tuple[Instruction, int]]:
    """Follows every path through a kernel, and finds instructions that conflict with earlier instructions.  Returns
    pairs: an instruction, and the number of the earlier instruction.

    Facts say what happened to the registers so far.  `entry` has the facts at the kernel's start.  `step(instruction,
    facts)` updates the facts, and returns the numbers of the earlier instructions in conflict.  `new(facts, known)`
    returns the facts that `known` lacks.  The search ends when no path has new facts."""
    block_by_start = {block_id: flow.block(block_id, 128) for block_id in sorted(flow.starts(128))}
    state_by_block: dict[int, _Facts] = {block_id: type(entry)() for block_id in block_by_start}
    state_by_block[0].update(entry)
    block_worklist, visited_blocks, conflicts = [0], set[int](), dict[tuple[int, int], None]()
    while block_worklist:
        block_id = block_worklist.pop()
        visited_blocks.add(block_id)
        flow_state = type(entry)(state_by_block[block_id])
        for instruction in flow.kernel.instructions[block_by_start[block_id].start : block_by_start[block_id].end]:
            conflicts |= dict.fromkeys((instruction.number, op_index) for op_index in step(instruction, flow_state))
        for next_start in block_by_start[block_id].following:
            if next_start in block_by_start:
                state_delta = new(flow_state, state_by_block[next_start])
                if state_delta or next_start not in visited_blocks:
                    state_by_block[next_start].update(state_delta)
                    block_worklist.append(next_start)
    return [(flow.kernel.instructions[later_index], op_index) for later_index, op_index in conflicts]


def _registers(instruction: Instruction, first: int = 0) -> list[int]:
    """Returns the register numbers of a wgmma's accumulators and of its operand A, or with `first` 1 of A alone.
    Returns an empty list for other instructions."""
    if not instruction.opcode.startswith("wgmma.mma_async"):
        return []
    operand_groups = [operand for operand in instruction.operands[first:2] if isinstance(operand, OperandGroup)]
    return [register.index for operand in operand_groups for register in registers_of(operand)]


def _step(instruction: Instruction, state: _EventState, taken: set[int]) -> set[int]:
    """Updates `state` for one instruction.  `state` holds the last accesses to the registers of wgmmas.  If the
    instruction is a wgmma, returns the indices of earlier instructions that conflict with it.  Such an instruction
    accesses the same registers, and no `wgmma.fence` comes in between."""
    early_accesses: set[int] = set()
    if instruction.opcode.startswith("wgmma.fence"):
        # A compiler may move reads to after the fence: they count again only after the next wgmma.
        new_state = {(FENCED, index): number for (kind, index), number in state.items() if kind in (REG_WGMMA, FENCED)}
        state.clear()
        state.update(new_state)
    elif instruction.opcode.startswith("wgmma.mma_async"):
        registers = _registers(instruction)
        event_keys = [(KERNEL_START, 0), *((kind, index) for kind in (REG_WRITE, REG_READ) for index in registers)]
        early_accesses = {state[event_key] for event_key in event_keys if event_key in state}
        for kind, index in [event_key for event_key in state if event_key[0] == FENCED]:
            state[REG_WGMMA, index] = state.pop((kind, index))
        for index in registers:
            state[REG_WGMMA, index] = instruction.number
            state.pop((REG_READ, index), None)
    elif not instruction.opcode.startswith("wgmma"):
        for register in uses(instruction):
            if (REG_WGMMA, register.index) in state:
                state[REG_READ, register.index] = instruction.number
        # LLVM moves a wgmma's operands into its registers, even after a fence; ptxas then moves the fence (its note
        # C7519). So a move counts only if the last fence came before another wgmma, or if there was no fence.
        is_free_move = instruction.parts[0] == "mov" and (KERNEL_START, 0) not in state
        for register in definitions(instruction):
            if register.index in taken and not (is_free_move and (REG_WGMMA, register.index) not in state):
                state[REG_WRITE, register.index] = instruction.number
    return early_accesses


def rewritten(flow: Flow) -> list[tuple[Instruction, Instruction]]:
    """Returns pairs: an instruction that overwrites a register of A, and a wgmma that may still read this register."""
    kernel = flow.kernel
    if not any(_registers(instruction, 1) for instruction in kernel.instructions):
        return []

    def younger(ages: _GroupAges, earlier: _GroupAges) -> _GroupAges:
        # The smallest age counts: on that path the most groups may be pending.
        return {index: age for index, age in ages.items() if index not in earlier or age < earlier[index]}

    conflicts = _follow(flow, _GroupAges(), _step_reads, younger)
    return [(reg_writer, kernel.instructions[instruction_index]) for reg_writer, instruction_index in conflicts]


def _step_reads(instruction: Instruction, ages: _GroupAges) -> set[int]:
    """Updates `ages` for one instruction.  Returns the wgmmas whose A registers this instruction overwrites too early.
    A wgmma is given by the index of its instruction.

    `ages` has an entry for each register that a wgmma may still read.  The entry holds the wgmma's index, and how many
    wgmma groups were committed since."""
    if instruction.opcode.startswith("wgmma.mma_async"):
        ages.update(dict.fromkeys(_registers(instruction, 1), (0, instruction.number)))
        return set()
    if instruction.opcode.startswith("wgmma.commit_group"):
        ages.update({index: (group_age + 1, wgmma_number) for index, (group_age, wgmma_number) in ages.items()})
        return set()
    if instruction.opcode.startswith("wgmma.wait_group"):
        max_groups = int(getattr(instruction.operands[0], "value", 0))
        for index in [index for index, (group_age, _) in ages.items() if group_age > max_groups]:
            del ages[index]
        return set()
    written_registers = {register.index for register in definitions(instruction)} & ages.keys()
    return {ages.pop(index)[1] for index in written_registers}
