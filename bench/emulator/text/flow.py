"""The control flow of a kernel: its basic blocks, and the registers whose earlier values each basic block needs.

A basic block ends at a branch, and before and after an instruction that may have to wait.  Lanes run in pieces; the
grain says what a piece is: a whole warpgroup, a whole warp, or a part of a warp.  An instruction that needs more lanes
than a piece has (`shfl` a warp, `wgmma` four warps) begins a basic block, so that pieces can wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rooflab.bench.emulator.text.parse import find_label
from rooflab.bench.emulator.text.syntax import Instruction, Label, PtxError, PtxKernel, definitions, uses

WARPGROUP = ("wgmma",)
"""The families of instructions that four warps execute together."""
WARP = frozenset("shfl vote match redux elect ldmatrix stmatrix mma activemask setmaxnreg bar barrier".split())
"""The families of instructions that a warp executes together."""


BRANCHES = frozenset(("bra", "brx", "ret", "exit", "trap", "brkpt"))
"""The families of instructions that end a basic block."""


@dataclass(frozen=True)
class BasicBlock:
    """The instructions from number `start` to number `end`, which does not belong to the basic block."""

    start: int
    end: int
    following: tuple[int, ...]
    """The numbers of the instructions that may run next.  The number after the last instruction is the kernel's end."""


def family(instruction: Instruction) -> str:
    """The family of an instruction: the first part of its opcode."""
    return instruction.opcode.split(".", 1)[0]


def lanes_together(instruction: Instruction) -> int:
    """The number of lanes that must be in one piece to execute an instruction: 128, 32 or 1."""
    name = family(instruction)
    if name in WARPGROUP:
        return 128
    return 32 if name in WARP else 1


def waits(instruction: Instruction) -> bool:
    """Whether an instruction may have to wait for other warps.  It is then a basic block of its own."""
    if instruction.opcode.startswith(("bar.warp", "barrier.cluster.arrive")):
        return False
    return instruction.opcode.startswith(("bar.", "barrier.", "mbarrier.try_wait", "nanosleep"))


class Flow:
    """The basic blocks of a kernel in every grain, with the registers that are live at the start of each."""

    def __init__(self, kernel: PtxKernel):
        self.kernel = kernel
        self.size = len(kernel.instructions)
        self._starts: dict[int, frozenset[int]] = {}
        self._targets = {
            instruction.number: self._targets_of(instruction)
            for instruction in kernel.instructions
            if family(instruction) in BRANCHES
        }

    def _targets_of(self, instruction: Instruction) -> tuple[int, ...]:
        name = family(instruction)
        if name not in ("bra", "brx"):
            return (self.size,)
        label = instruction.operands[-1]
        if not isinstance(label, Label):
            raise PtxError(f"PTX: expected a label in {instruction.text!r}")
        if name == "bra":
            return (self.kernel.labels[find_label(self.kernel.labels, label.name)],)
        table = self.kernel.tables[find_label(dict.fromkeys(self.kernel.tables, 0), label.name)]
        return tuple(self.kernel.labels[find_label(self.kernel.labels, name)] for name in table)

    def targets(self, number: int) -> tuple[int, ...]:
        """The numbers of the instructions that a branch may jump to.  A guarded branch may also fall through."""
        return self._targets[number]

    def starts(self, grain: int) -> frozenset[int]:
        """The numbers of the instructions where basic blocks begin for pieces of `grain` lanes (128, 32 or 1)."""
        if grain not in self._starts:
            self._starts[grain] = self._find_starts(grain)
        return self._starts[grain]

    def _find_starts(self, grain: int) -> frozenset[int]:
        starts = {0}
        for instruction in self.kernel.instructions:
            number = instruction.number
            if number in self._targets:
                starts |= {number + 1, *self._targets[number]}
            elif waits(instruction):
                starts |= {number, number + 1}
            elif lanes_together(instruction) > grain:
                starts.add(number)
        return frozenset(start for start in starts if start < self.size)

    def block(self, start: int, grain: int) -> BasicBlock:
        """The basic block that begins at instruction `start`, for pieces of `grain` lanes."""
        starts = self.starts(grain)
        number = start
        while number < self.size:
            if number in self._targets:
                targets = self._targets[number]
                falls = self.kernel.instructions[number].predicate is not None
                return BasicBlock(start, number + 1, (*targets, number + 1) if falls else targets)
            number += 1
            if number in starts:
                break
        return BasicBlock(start, number, (number,))

    @cached_property
    def live(self) -> dict[int, frozenset[int]]:
        """By start of a basic block of the finest grain: the registers whose earlier values are read there or later."""
        order = sorted(self.starts(1))
        blocks = {start: self.block(start, 1) for start in order}
        gen: dict[int, set[int]] = {}
        kill: dict[int, set[int]] = {}
        for start, block in blocks.items():
            needed, made = set[int](), set[int]()
            for instruction in self.kernel.instructions[block.start : block.end]:
                needed |= {register.index for register in uses(instruction)} - made
                if instruction.predicate is None:
                    made |= {register.index for register in definitions(instruction)}
                else:
                    # A guarded instruction may leave its result register unchanged, so the old value is needed.
                    needed |= {register.index for register in definitions(instruction)} - made
            gen[start], kill[start] = needed, made
        live = {start: frozenset(gen[start]) for start in order}
        changed = True
        while changed:
            changed = False
            for start in reversed(order):
                after: set[int] = set()
                for following in blocks[start].following:
                    after |= live.get(following, frozenset())
                now = frozenset(gen[start] | (after - kill[start]))
                if now != live[start]:
                    live[start], changed = now, True
        return live
