"""A light reading of SASS: instructions, and the registers they write and read.

The text is `cuobjdump -sass`'s.  What is not understood is an instruction like any other: it takes an issue slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\b(U?R|U?P)(\d+)(\.64)?")
_RESULT = re.compile(r"U?R(\d+|Z)\b|U?P(\d|T)\b")
_PREDICATE = re.compile(r"U?P(\d|T)")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_CONTROL = frozenset("BAR BRA BRX BSSY BSYNC CALL DEPBAR EXIT MEMBAR NOP RED RET WARPSYNC WARPGROUP YIELD".split())
_MMA_SHAPES = {"884": (8, 8, 4), "1684": (16, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32)}
_WARPGROUP_MMA = frozenset(("HGMMA", "QGMMA", "IGMMA", "BGMMA"))
_WARP_MMA = frozenset(("HMMA", "QMMA", "IMMA"))
_GLOBAL_LOADS = frozenset(("LDG", "LD"))
_ASYNC_LOADS = frozenset(("LDGSTS",))
_TMA_STORES = frozenset(("UTMASTG", "UTMAREDG"))
_SHARED_STORES = frozenset(("STS", "STSM"))
_COMMIT = re.compile(r"gsb\d+$")
WARPGROUP = 4
"""Warps that execute one wgmma together."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    address: int
    opcode: str
    """With its modifiers: `LDG.E.128`."""
    operands: tuple[str, ...]
    guard: str = ""
    """The predicate before it, if any: `!P1`."""

    @cached_property
    def family(self) -> str:
        """The part before the first dot."""
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        """The parts after the first dot."""
        return tuple(self.opcode.split(".")[1:])

    @property
    def target(self) -> int | None:
        """Where a branch goes, or None."""
        if self.family != "BRA" or not self.operands:
            return None
        found = _TARGET.search(self.operands[-1])
        return int(found[1], 16) if found else None

    @property
    def bytes_per_thread(self) -> int:
        """Bytes that a load or store moves for each thread; 0 for all else, and for a TMA copy, which names a tile."""
        if not self.family.startswith(("LD", "ST", "ATOM", "RED")) or self.family in ("LDC", "LDGDEPBAR"):
            return 0
        if self.family in ("LDSM", "STSM"):
            return 4 * int(self.modifiers[-1]) if self.modifiers and self.modifiers[-1].isdigit() else 4
        for width in self.modifiers:
            if width in ("128", "64"):
                return int(width) // 8
            if width in ("U16", "S16", "U8", "S8"):
                return int(width[1:]) // 8
        return 4

    @property
    def loads_global(self) -> bool:
        """Whether registers are loaded from global memory."""
        return self.family in _GLOBAL_LOADS

    @property
    def loads_async(self) -> bool:
        """Whether shared memory is filled without registers: cp.async or a TMA copy."""
        return self.family in _ASYNC_LOADS or self.family.startswith("UTMALDG")

    @property
    def stores_global(self) -> bool:
        """Whether registers are stored to global memory, or added to what is there."""
        return self.family in ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG")

    @property
    def stores_tile(self) -> bool:
        """Whether a TMA copy sends a tile of shared memory to global memory."""
        return self.family in _TMA_STORES

    @property
    def stores_shared(self) -> bool:
        """Whether registers are stored to shared memory."""
        return self.family in _SHARED_STORES

    @property
    def commits(self) -> bool:
        """Whether it ends a group of wgmma that can be waited for."""
        return self.is_wgmma and bool(self.operands) and bool(_COMMIT.match(self.operands[-1]))

    @property
    def groups_left(self) -> int | None:
        """Of a wait for wgmma, how many groups may be on their way after it; None for all else."""
        if self.family != "WARPGROUP" or "DEPBAR" not in self.modifiers:
            return None
        return int(self.operands[-1], 16)

    @property
    def is_wgmma(self) -> bool:
        """Whether four warps execute it together."""
        return self.family in _WARPGROUP_MMA

    @property
    def mma_shape(self) -> tuple[int, int, int] | None:
        """M, N, K of a matrix product, or None."""
        if self.family in _WARPGROUP_MMA:
            sizes = [part for part in self.modifiers if re.fullmatch(r"\d+x\d+x\d+", part)]
            m, n, k = map(int, sizes[0].split("x")) if sizes else (0, 0, 0)
            return (m, n, k) if sizes else None
        if self.family in _WARP_MMA:
            return next((_MMA_SHAPES[part] for part in self.modifiers if part in _MMA_SHAPES), None)
        return None

    @property
    def mma_flops(self) -> int:
        """FLOPs of a matrix product, of the warp or the warpgroup; 0 for all else."""
        shape = self.mma_shape
        return 2 * shape[0] * shape[1] * shape[2] if shape else 0

    @property
    def mma_dtype(self) -> str:
        """Operand dtype of a matrix product, by the names of `Device.matrix_flops_per_s`."""
        if self.family in ("IMMA", "IGMMA"):
            return "int8"
        if self.family in ("QMMA", "QGMMA"):
            return "fp8_e4m3"
        return next((name.lower() for name in ("TF32", "BF16") if name in self.modifiers), "fp16")

    @cached_property
    def writes(self) -> frozenset[str]:
        """Registers and predicates that it writes."""
        return frozenset(self._split[0])

    @cached_property
    def reads(self) -> frozenset[str]:
        """Registers and predicates that it reads, its guard included; of a wide operand, the first two."""
        return frozenset(self._split[1])

    @cached_property
    def _split(self) -> tuple[list[str], list[str]]:
        count = 0
        if self.family not in _CONTROL and self.operands and _RESULT.match(self.operands[0]):
            # A carry or a second predicate comes beside the result: `IADD3 R4, P0, ...`, `SHFL.BFLY PT, R4, ...`.
            beside = any(_PREDICATE.fullmatch(operand) for operand in self.operands[:2])
            count = 2 if beside and len(self.operands) > 1 else 1
        written = [name for operand in self.operands[:count] for name in _names(operand, self._width)]
        read = [name for operand in (*self.operands[count:], self.guard) for name in _names(operand, 1)]
        return written, read

    @property
    def _width(self) -> int:
        """Registers of 32 bits in a result."""
        shape = self.mma_shape
        if shape:
            return shape[0] * shape[1] // (32 * (WARPGROUP if self.is_wgmma else 1))
        if "WIDE" in self.modifiers:
            return 2
        return max(1, self.bytes_per_thread // 4) if self.family.startswith("LD") else 1


def _names(operand: str, width: int) -> list[str]:
    names = []
    for kind, number, wide in _REGISTER.findall(operand):
        names += [f"{kind}{int(number) + offset}" for offset in range(2 if wide else width if "R" in kind else 1)]
    return names


def parse(sass: str) -> tuple[Instruction, ...]:
    """Reads `cuobjdump -sass`.  Raises `ValueError` where there is no instruction in it."""
    code = []
    for line in sass.splitlines():
        found = _LINE.match(line)
        if found:
            address, guard, opcode, operands = found.groups()
            parts = tuple(part.strip() for part in operands.split(",")) if operands.strip() else ()
            code.append(Instruction(int(address, 16), opcode.rstrip("."), parts, guard or ""))
    if not code:
        raise ValueError("sass: expected the instructions of a kernel, got none")
    return tuple(code)
