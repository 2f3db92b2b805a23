"""Computes a kernel's basic blocks, and the registers that are live at the start of each basic block.

Basic blocks end at branches and around instructions that may wait for other warps.  Lanes run in groups: warpgroups
(grain 128), warps (grain 32) or parts of a warp (grain 1).  An instruction for a larger group, such as `wgmma`, begins
a basic block.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, cached_property

from rooflab.bench.emulator.text.parse import find_label
from rooflab.bench.emulator.text.syntax import Instruction, Label, PtxError, PtxKernel, definitions, uses

WARPGROUP = ("wgmma",)
"""The families of instructions that four warps execute together."""
WARP = frozenset("shfl vote match redux elect ldmatrix stmatrix mma activemask setmaxnreg bar barrier".split())
"""The families of instructions that a warp executes together."""


BRANCH_FAMILIES = frozenset(("bra", "brx", "ret", "exit", "trap", "brkpt"))
"""The families of instructions that end a basic block."""


@dataclass(frozen=True)
class BasicBlock:
    """Describes a basic block: the instructions with the numbers `start` to `end - 1`."""

    start: int
    end: int
    following: tuple[int, ...]
    """The numbers of the instructions that may run next.  The number after the last instruction is the kernel's end."""


def family(instruction: Instruction) -> str:
    """Returns the family of an instruction: the first part of its opcode."""
    return instruction.opcode.split(".", 1)[0]


def lanes_together(instruction: Instruction) -> int:
    """Returns the number of lanes that must run together to execute an instruction: 128, 32 or 1."""
    opcode_family = family(instruction)
    if opcode_family in WARPGROUP:
        return 128
    return 32 if opcode_family in WARP else 1


def waits(instruction: Instruction) -> bool:
    """Returns whether an instruction may have to wait for other warps.  Such an instruction is a whole basic block."""
    if instruction.opcode.startswith(("bar.warp", "barrier.cluster.arrive")):
        return False
    return instruction.opcode.startswith(("bar.", "barrier.", "mbarrier.try_wait", "nanosleep"))


class Flow:
    """Computes a kernel's basic blocks, and the live registers at the start of each block.  The blocks depend on the
    number of lanes that run together: 128, 32 or 1."""

    def __init__(self, kernel: PtxKernel):
        self.kernel = kernel
        self.size = len(kernel.instructions)
        self.starts = cache(self._starts)
        """Returns the indices of the instructions where basic blocks begin, in order.  Its argument, the grain, is the
        number of lanes that run together: 128, 32 or 1.  An instruction that needs more lanes begins a new block."""
        self.targets = {
            instruction.number: self._targets_of(instruction)
            for instruction in kernel.instructions
            if family(instruction) in BRANCH_FAMILIES
        }
        """By number of a branch: the instructions that it may jump to.  A guarded branch may also fall through."""

    def _targets_of(self, instruction: Instruction) -> tuple[int, ...]:
        name = family(instruction)
        if name not in ("bra", "brx"):
            return (self.size,)
        branch_label = instruction.operands[-1]
        if not isinstance(branch_label, Label):
            raise PtxError(f"PTX: expected a label in {instruction.text!r}")
        if name == "bra":
            return (self.kernel.labels[find_label(self.kernel.labels, branch_label.name)],)
        branch_table = self.kernel.tables[find_label(dict.fromkeys(self.kernel.tables, 0), branch_label.name)]
        return tuple(self.kernel.labels[find_label(self.kernel.labels, name)] for name in branch_table)

    def _starts(self, grain: int) -> list[int]:
        block_starts = {0}
        for instruction in self.kernel.instructions:
            instruction_index = instruction.number
            if instruction_index in self.targets:
                block_starts |= {instruction_index + 1, *self.targets[instruction_index]}
            elif waits(instruction):
                block_starts |= {instruction_index, instruction_index + 1}
            elif lanes_together(instruction) > grain:
                block_starts.add(instruction_index)
        return sorted(start for start in block_starts if start < self.size)

    def block(self, start: int, grain: int) -> BasicBlock:
        """Returns the basic block that begins at the instruction number `start`.  `grain` is the number of lanes that
        run the block together: 128, 32 or 1."""
        block_starts = self.starts(grain)
        index = bisect_right(block_starts, start)
        end = block_starts[index] if index < len(block_starts) else self.size
        following = self.targets.get(end - 1, (end,))
        if end - 1 in self.targets and self.kernel.instructions[end - 1].predicate is not None:
            following = (*following, end)
        return BasicBlock(start, end, following)

    def stores_of(self, number: int) -> frozenset[int]:
        """Returns the stores and atomics that the result of an instruction may decide, by registers alone: their
        values, addresses or predicates."""
        tainted = {register.index for register in definitions(self.kernel.instructions[number])}
        stores, grows = set[int](), True
        while grows:
            grows = False
            for instruction in self.kernel.instructions:
                if tainted.isdisjoint(register.index for register in uses(instruction)):
                    continue
                if family(instruction) in ("st", "red", "atom"):
                    stores.add(instruction.number)
                results = {register.index for register in definitions(instruction)}
                grows |= not results <= tainted
                tainted |= results
        return frozenset(stores)

    @cached_property
    def live(self) -> dict[int, frozenset[int]]:
        """Returns the live registers at the start of each basic block.  The key is the index of the block's first
        instruction.  A new block also begins at each instruction that several lanes must run together."""
        start_order = self.starts(1)
        block_by_start = {start: self.block(start, 1) for start in start_order}
        uses_by_block: dict[int, set[int]] = {}
        defs_by_block: dict[int, set[int]] = {}
        for start, basic_block in block_by_start.items():
            used_registers, defined_registers = set[int](), set[int]()
            for instruction in self.kernel.instructions[basic_block.start : basic_block.end]:
                used_registers |= {register.index for register in uses(instruction)} - defined_registers
                if instruction.predicate is None:
                    defined_registers |= {register.index for register in definitions(instruction)}
                else:
                    # A guarded instruction may leave its result register unchanged, so the old value is needed.
                    used_registers |= {register.index for register in definitions(instruction)} - defined_registers
            uses_by_block[start], defs_by_block[start] = used_registers, defined_registers
        live_registers = {start: frozenset(uses_by_block[start]) for start in start_order}
        has_changed = True
        while has_changed:
            has_changed = False
            for start in reversed(start_order):
                live_out_regs: set[int] = set()
                for next_start in block_by_start[start].following:
                    live_out_regs |= live_registers.get(next_start, frozenset())
                live_in_regs = frozenset(uses_by_block[start] | (live_out_regs - defs_by_block[start]))
                if live_in_regs != live_registers[start]:
                    live_registers[start], has_changed = live_in_regs, True
        return live_registers
