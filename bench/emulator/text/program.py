"""A kernel that is ready to run: its basic blocks, the functions of the basic blocks, and facts about its accesses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from rooflab.bench.emulator.text.flow import BasicBlock, Flow, lanes_together
from rooflab.bench.emulator.text.kinds import DTYPES
from rooflab.bench.emulator.text.syntax import Immediate, Instruction, PtxKernel
from rooflab.bench.emulator.text.wgmma_registers import rewritten, unfenced

_STRONG = {"acquire": "acquire", "release": "release", "relaxed": "relaxed", "volatile": "relaxed", "mmio": "relaxed"}
_ORDERS = frozenset(("acquire", "release", "acq_rel", "sc"))
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


_WIDEST = 16
_OTHER_PIECES = 4
"""The bytes of one access of a copy whose size is known only at the launch."""
_MBARRIER = 8
SEQUENTIAL = (
    "wgmma",
    "mbarrier",
    "cp.async.bulk",
    "cp.reduce.async.bulk",
    "tensormap",
    "barrier.cluster",
    "mapa",
    "setmaxnreg",
    "bar.red",
    "barrier.red",
    "barrier.cta.red",
    "bar.cta.red",
)
"""The instructions that make a CTA run alone, not in one vector with other CTAs."""
BlockFunction = Callable[[Any, list[Any]], int]
"""Runs a basic block for a context and its registers; returns the next instruction's number, or why the run stops."""


def granule(kernel: PtxKernel, space: str) -> int:
    """The bytes of the narrowest access to a state space: 1 to 16, a power of two.

    Bulk copies, ldmatrix and wgmma access 16 bytes or more; a tensor's edge may cut a box between any two elements.
    """
    return min((_width(instruction, space) for instruction in kernel.instructions), default=_WIDEST)


def _width(instruction: Instruction, space: str) -> int:
    parts = instruction.parts
    if parts[0] in ("ld", "ldu", "st", "atom", "red"):
        named = {part.split("::")[0] for part in parts[1:]} & {"global", "shared", "local", "param", "const"}
        kinds = [part for part in parts if part in DTYPES and DTYPES[part] != "?"]
        if not kinds or (named and space not in named):
            return _WIDEST
        # An atomic on a vector is one atomic for each element.
        vector = 1 if parts[0] in ("atom", "red") else max([1, *(_VECTORS.get(part, 1) for part in parts)])
        return min(_WIDEST, vector * int(DTYPES[kinds[-1]][1]))
    if instruction.opcode.startswith(("cp.async.bulk.tensor", "cp.reduce")):
        return 1 if space == "global" else _WIDEST
    if parts[:2] == ["cp", "async"] and parts[2] in ("ca", "cg"):
        size = instruction.operands[2]
        whole = int(size.value) if isinstance(size, Immediate) and size.value in (4, 8, 16) else _OTHER_PIECES
        return min(whole, _OTHER_PIECES) if space == "global" and len(instruction.operands) > 3 else whole
    return _MBARRIER if space == "shared" and "mbarrier" in instruction.opcode else _WIDEST


class Program:
    """A kernel from a text in PTX `version`.  `generator` makes the functions of basic blocks."""

    def __init__(
        self, version: str, kernel: PtxKernel, generator: Callable[[Flow], Callable[[BasicBlock], BlockFunction]]
    ):
        self.version, self.kernel = version, kernel
        self.flow = Flow(kernel)
        self.size = self.flow.size
        self._generate = generator(self.flow)
        self._functions: dict[tuple[int, int], BlockFunction] = {}
        self._blocks: dict[tuple[int, int], BasicBlock] = {}
        self.together = [lanes_together(instruction) for instruction in kernel.instructions]
        """For each instruction, the number of lanes that execute it as one piece."""

    def function(self, place: int, grain: int) -> BlockFunction:
        """The function of the basic block that begins at instruction `place`."""
        key = (place, grain)
        if key not in self._functions:
            self._functions[key] = self._generate(self.block(place, grain))
        return self._functions[key]

    def block(self, place: int, grain: int) -> BasicBlock:
        """The basic block that begins at instruction `place`."""
        key = (place, grain)
        if key not in self._blocks:
            self._blocks[key] = self.flow.block(place, grain)
        return self._blocks[key]

    @cached_property
    def strong(self) -> dict[int, str]:
        """By number, the order (relaxed, acquire, release) of strong loads and stores: two of these do not race."""
        orders = {}
        for instruction in self.kernel.instructions:
            if instruction.parts[0] in ("ld", "st"):
                for part in instruction.parts[1:]:
                    if part in _STRONG:
                        orders[instruction.number] = "relaxed" if "cta" in instruction.parts else _STRONG[part]
        return orders

    @cached_property
    def orders_ctas(self) -> bool:
        """Whether an instruction of the kernel can order one CTA's actions before another CTA's actions."""
        return any(
            parts[0] == "membar" or (parts[0] in ("fence", "ld", "st", "atom", "red") and _ORDERS & {*parts})
            for parts in (instruction.parts for instruction in self.kernel.instructions)
            if "cta" not in parts and "proxy" not in parts
        )

    @cached_property
    def granules(self) -> dict[str, int]:
        """By state space, shared and global, the bytes of the narrowest access."""
        return {space: granule(self.kernel, space) for space in ("shared", "global")}

    @cached_property
    def unfenced(self) -> list[tuple[Instruction, Instruction | None]]:
        """Each wgmma that lacks a fence, with the earlier access of its registers; None: the kernel's beginning."""
        return unfenced(self.flow)

    @cached_property
    def rewritten(self) -> list[tuple[Instruction, Instruction]]:
        """Each write of a register that an earlier wgmma may still have to read, with this wgmma."""
        return rewritten(self.flow)

    @cached_property
    def sequential(self) -> bool:
        """Whether a CTA (or a cluster) must run alone, because of an instruction in `SEQUENTIAL`."""
        return any(instruction.opcode.startswith(SEQUENTIAL) for instruction in self.kernel.instructions)
