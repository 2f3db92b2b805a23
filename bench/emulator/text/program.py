"""Prepares a kernel for execution: its basic blocks, a Python function for each block, and facts about its accesses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from rooflab.bench.emulator.text.flow import BasicBlock, Flow, lanes_together
from rooflab.bench.emulator.text.kinds import DTYPES
from rooflab.bench.emulator.text.syntax import Immediate, Instruction, PtxKernel
from rooflab.bench.emulator.text.wgmma_registers import rewritten, unfenced

_ORDER_OF = {"acquire": "acquire", "release": "release", "relaxed": "relaxed", "volatile": "relaxed", "mmio": "relaxed"}
_SYNC_ORDERS = frozenset(("acquire", "release", "acq_rel", "sc"))
_VECTOR_SIZES = {"v2": 2, "v4": 4, "v8": 8}


_MAX_WIDTH_BYTES = 16
_COPY_PIECE_BYTES = 4
"""The bytes of one access of a copy whose size is known only at the launch."""
_MBARRIER_BYTES = 8
SEQUENTIAL_OPS = (
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
    """Returns the bytes of the kernel's narrowest access to a state space: a power of two from 1 to 16.

    Bulk copies, ldmatrix and wgmma count as 16 bytes.  A tensor copy counts as 1 byte of global memory, because a
    tensor may end anywhere in a box."""
    return min((_width(instruction, space) for instruction in kernel.instructions), default=_MAX_WIDTH_BYTES)


def _width(instruction: Instruction, space: str) -> int:
    parts = instruction.parts
    if parts[0] in ("ld", "ldu", "st", "atom", "red"):
        state_spaces = {part.split("::")[0] for part in parts[1:]} & {"global", "shared", "local", "param", "const"}
        type_names = [part for part in parts if part in DTYPES and DTYPES[part] != "?"]
        if not type_names or (state_spaces and space not in state_spaces):
            return _MAX_WIDTH_BYTES
        # An atomic on a vector is one atomic for each element.
        vector_length = 1 if parts[0] in ("atom", "red") else max([1, *(_VECTOR_SIZES.get(part, 1) for part in parts)])
        return min(_MAX_WIDTH_BYTES, vector_length * int(DTYPES[type_names[-1]][1]))
    if instruction.opcode.startswith(("cp.async.bulk.tensor", "cp.reduce")):
        return 1 if space == "global" else _MAX_WIDTH_BYTES
    if parts[:2] == ["cp", "async"] and parts[2] in ("ca", "cg"):
        size = instruction.operands[2]
        copy_bytes = int(size.value) if isinstance(size, Immediate) and size.value in (4, 8, 16) else _COPY_PIECE_BYTES
        return min(copy_bytes, _COPY_PIECE_BYTES) if space == "global" and len(instruction.operands) > 3 else copy_bytes
    return _MBARRIER_BYTES if space == "shared" and "mbarrier" in instruction.opcode else _MAX_WIDTH_BYTES


class Program:
    """Prepares a kernel for execution.  `version` is its PTX version; `generator` makes a function per basic block."""

    def __init__(
        self, version: str, kernel: PtxKernel, generator: Callable[[Flow], Callable[[BasicBlock], BlockFunction]]
    ):
        self.version, self.kernel = version, kernel
        self.flow = Flow(kernel)
        self.size = self.flow.size
        generate = generator(self.flow)
        self.block = cache(self.flow.block)
        """Returns the basic block that begins at an instruction, for groups of lanes: `block(place, grain)`."""
        self.function = cache(lambda place, grain: generate(self.block(place, grain)))
        """Returns the Python function of a basic block: `function(place, grain)`."""
        self.together = [lanes_together(instruction) for instruction in kernel.instructions]
        """For each instruction, the number of lanes that execute it as one piece."""

    @cached_property
    def strong(self) -> dict[int, str]:
        """Returns the memory order (relaxed, acquire or release) of each strong load or store, by instruction number.
        PTX calls an access strong if it has such an order or is volatile.  Two strong accesses do not race."""
        return {
            instruction.number: "relaxed" if "cta" in instruction.parts else _ORDER_OF[opcode_part]
            for instruction in self.kernel.instructions
            if instruction.parts[0] in ("ld", "st")
            for opcode_part in instruction.parts[1:]
            if opcode_part in _ORDER_OF
        }

    @cached_property
    def orders_ctas(self) -> bool:
        """Returns whether any instruction of the kernel can order one CTA's actions before another CTA's actions."""
        return any(
            parts[0] == "membar" or (parts[0] in ("fence", "ld", "st", "atom", "red") and _SYNC_ORDERS & {*parts})
            for parts in (instruction.parts for instruction in self.kernel.instructions)
            if "cta" not in parts and "proxy" not in parts
        )

    @cached_property
    def lets_next_begin(self) -> bool:
        """Returns whether any instruction lets a dependent launch begin before the kernel ends."""
        return any(instruction.opcode == "griddepcontrol.launch_dependents" for instruction in self.kernel.instructions)

    @cached_property
    def granules(self) -> dict[str, int]:
        """Returns the width in bytes of the narrowest access to each state space, `shared` and `global`."""
        return {state_space: granule(self.kernel, state_space) for state_space in ("shared", "global")}

    @cached_property
    def unfenced(self) -> list[tuple[Instruction, Instruction | None]]:
        """Returns pairs: a wgmma that lacks a fence, and the access before it that needs the fence.  The access is None
        if the fence is missing between the kernel's start and its first wgmma."""
        return unfenced(self.flow)

    @cached_property
    def rewritten(self) -> list[tuple[Instruction, Instruction]]:
        """Returns pairs: an instruction that overwrites a register, and a wgmma that may still read this register."""
        return rewritten(self.flow)

    @cached_property
    def sequential(self) -> bool:
        """Returns whether a CTA or cluster must run alone: it has an instruction of `SEQUENTIAL_OPS`."""
        return any(instruction.opcode.startswith(SEQUENTIAL_OPS) for instruction in self.kernel.instructions)
