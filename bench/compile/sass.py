"""Parses SASS, the machine code of NVIDIA GPUs, as `cuobjdump -sass` or `nvdisasm -c` prints it.

The result is a list of functions, and the registers that each instruction reads and writes.  An unknown instruction is
counted, but has no family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "wgmma": ("HGMMA", "IGMMA", "QGMMA", "BGMMA"),
    "mma": ("HMMA", "IMMA", "QMMA", "OMMA", "DMMA", "BMMA"),
    "tma": ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"),
    "cp_async": ("LDGSTS",),
    "ldmatrix": ("LDSM",),
    "global_load": ("LDG", "LD"),
    "global_store": ("STG", "ST"),
    "shared_load": ("LDS",),
    "shared_store": ("STS", "STSM"),
    "spill_load": ("LDL",),
    "spill_store": ("STL",),
    "atomic": ("ATOM", "ATOMG", "ATOMS", "RED", "REDG", "REDS"),
    "fma": ("FFMA", "FFMA2", "DFMA"),
    "special_function": ("MUFU",),
    "barrier": ("BAR", "SYNCS", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "UCGABAR_WAIT"),
}
"""The families of instructions.  A family has the parts of opcodes before the first dot.

`tma`: copies by the tensor memory accelerator.  `cp_async`: Ampere's copies that bypass the registers.  `fma`:
multiply-adds, which compute a matrix product if the kernel uses no tensor core.
"""
TENSOR_CORES = ("wgmma", "mma")
"""The families of tensor-core instructions, the newest first."""
TMA_STORES = ("UTMASTG", "UTMAREDG")
"""TMA copies from shared memory to global memory."""
_OPCODE_FAMILY = {opcode: family for family, opcodes in FAMILIES.items() for opcode in opcodes}
_SUFFIX_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_DEFAULT_BYTES = 4
WARPGROUP_WARPS = 4
"""The number of warps that execute one wgmma together."""

_FUNCTION_HEADING = re.compile(r"^(?:\.text\.(\S+):|\s+Function : (\S+))$")
_LABEL_LINE = re.compile(r"^([.$\w][\w.$@]*):\s*$")
_INSTRUCTION_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*)$")
_COMMENT = re.compile(r'\(\*(?!"BRANCH_TARGETS ).*')
_REGISTER_PATTERN = re.compile(r"\b(U?R|U?P)(\d+)(\.64)?")
_RESULT_REGISTER = re.compile(r"U?R(\d+|Z)\b|U?P(\d|T)\b")
_PREDICATE_NAME = re.compile(r"U?P(\d|T)")
_BRANCH_ADDRESS = re.compile(r"0x([0-9a-f]+)\s*$")
_COMMIT_OPERAND = re.compile(r"gsb\d+$")
_TILE_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
_CONTROL_OPS = frozenset("BAR BRA BRX BSSY BSYNC CALL DEPBAR EXIT MEMBAR NOP RED RET WARPSYNC WARPGROUP YIELD".split())
_MMA_SHAPES = {"884": (8, 8, 4), "1684": (16, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32)}
_WARP_MMA = ("HMMA", "QMMA", "IMMA")


@dataclass(frozen=True)
class SassInstruction:
    """One SASS instruction."""

    address: int
    guard: str
    """The predicate, such as `@!P0`; empty if the instruction always executes."""
    opcode: str
    """The opcode with its modifiers, such as `LDG.E.128`."""
    operands: str
    """The text of the operands.  `nvdisasm` adds the targets of an indirect branch, after `BRANCH_TARGETS`."""

    @cached_property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def family(self) -> str | None:
        """Returns the instruction's family, a key of `FAMILIES`; None if the instruction belongs to no family."""
        return _OPCODE_FAMILY.get(self.name)

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the opcode after the first dot."""
        return tuple(self.opcode.split(".")[1:])

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The operands of the instruction, as separate texts."""
        return tuple(operand.strip() for operand in self.operands.split(",")) if self.operands else ()

    @property
    def bytes_per_thread(self) -> int:
        """Returns the bytes that a load or store moves per thread; 0 for other instructions and for TMA copies."""
        if not self.name.startswith(("LD", "ST", "ATOM", "RED")) or self.name in ("LDC", "LDGDEPBAR"):
            return 0
        if self.name in ("LDSM", "STSM"):
            return 4 * int(self.modifiers[-1]) if self.modifiers and self.modifiers[-1].isdigit() else 4
        return width_bytes(self.opcode)

    @property
    def target(self) -> int | None:
        """Returns the target address of a branch; None for other instructions."""
        address_match = _BRANCH_ADDRESS.search(self.operands) if self.name == "BRA" else None
        return int(address_match[1], 16) if address_match else None

    @property
    def loads_global(self) -> bool:
        """Whether this instruction loads registers from global memory."""
        return self.family == "global_load"

    @property
    def loads_async(self) -> bool:
        """Whether this instruction copies to shared memory without registers: cp.async, TMA copy or bulk copy."""
        return self.family == "cp_async" or self.fills_by_tma

    @property
    def fills_by_tma(self) -> bool:
        """Whether this is a TMA or bulk copy from global to shared memory, with an mbarrier that counts the bytes."""
        return self.name == "UTMALDG" or (self.name == "UBLKCP" and self.modifiers[:2] == ("S", "G"))

    @property
    def stores_global(self) -> bool:
        """Returns whether this instruction stores registers to global memory, or changes values there atomically."""
        return self.family == "global_store" or self.name in ("RED", "REDG", "ATOM", "ATOMG")

    @property
    def commits(self) -> bool:
        """Whether this instruction closes a group of wgmma instructions.  Later code can wait for this group."""
        return self.is_wgmma and bool(_COMMIT_OPERAND.search(self.operands))

    @property
    def groups_left(self) -> int | None:
        """Returns how many wgmma groups may still run after this wait instruction; None for other instructions."""
        if self.name != "WARPGROUP" or "DEPBAR" not in self.modifiers:
            return None
        return int(self.arguments[-1], 16)

    @property
    def is_wgmma(self) -> bool:
        """Returns whether this is a wgmma instruction, which four warps execute together."""
        return self.family == "wgmma"

    @cached_property
    def mma_shape(self) -> tuple[int, int, int] | None:
        """Returns the tile shape `(M, N, K)` of a tensor-core instruction; None for other instructions."""
        if self.is_wgmma:
            mnk_match = next((mnk for suffix in self.modifiers if (mnk := _TILE_SHAPE.fullmatch(suffix))), None)
            return (int(mnk_match[1]), int(mnk_match[2]), int(mnk_match[3])) if mnk_match else None
        if self.name in _WARP_MMA:
            return next((_MMA_SHAPES[suffix] for suffix in self.modifiers if suffix in _MMA_SHAPES), None)
        return None

    @property
    def mma_flops(self) -> int:
        """Returns the FLOPs of a matrix instruction, per warp (mma) or per warpgroup (wgmma); else 0."""
        mma_shape = self.mma_shape
        return 2 * mma_shape[0] * mma_shape[1] * mma_shape[2] if mma_shape else 0

    @property
    def mma_dtype(self) -> str:
        """Returns the operand dtype of a tensor-core instruction, as a key of `Device.matrix_flops_per_s`."""
        if self.name in ("IMMA", "IGMMA"):
            return "int8"
        if self.name in ("QMMA", "QGMMA"):
            return "fp8_e4m3"
        return next((name.lower() for name in ("TF32", "BF16") if name in self.modifiers), "fp16")

    @property
    def writes(self) -> frozenset[str]:
        """Returns the names of the registers and predicates that the instruction writes."""
        return self._registers[0]

    @property
    def reads(self) -> frozenset[str]:
        """The registers and predicates that the instruction reads.  A 64-bit register counts as two, others as one."""
        return self._registers[1]

    @cached_property
    def _registers(self) -> tuple[frozenset[str], frozenset[str]]:
        result_count = 0
        if self.name not in _CONTROL_OPS and _RESULT_REGISTER.match(self.operands):
            # A carry or a second predicate stands beside the result: `IADD3 R4, P0, ...`, `SHFL.BFLY PT, R4, ...`.
            has_predicate = any(_PREDICATE_NAME.fullmatch(operand) for operand in self.arguments[:2])
            result_count = 2 if has_predicate and len(self.arguments) > 1 else 1
        written_names = (name for operand in self.arguments[:result_count] for name in _names(operand, self._width))
        source_names = (name for operand in (*self.arguments[result_count:], self.guard) for name in _names(operand, 1))
        return frozenset(written_names), frozenset(source_names)

    @property
    def _width(self) -> int:
        """Returns the number of 32-bit registers that hold the instruction's result in one thread."""
        mma_shape = self.mma_shape
        if mma_shape:
            return mma_shape[0] * mma_shape[1] // (32 * (WARPGROUP_WARPS if self.is_wgmma else 1))
        if "WIDE" in self.modifiers:
            return 2
        return max(1, self.bytes_per_thread // 4) if self.name.startswith("LD") else 1


def _names(operand: str, width: int) -> list[str]:
    return [
        f"{register_kind}{int(register_number) + register_offset}"
        for register_kind, register_number, is_64_bit in _REGISTER_PATTERN.findall(operand)
        for register_offset in range(2 if is_64_bit else width if "R" in register_kind else 1)
    ]


@dataclass(frozen=True)
class SassFunction:
    """The SASS code of one kernel."""

    name: str
    instructions: tuple[SassInstruction, ...]
    labels: Mapping[str, int] = field(default_factory=dict)
    """The address of each label; empty if the text has no labels."""


def width_bytes(opcode: str) -> int:
    """Returns the bytes that a load or store with this opcode moves per thread.

    A modifier gives the width: `.U8` is 1 byte, and `.128` (bits) is 16 bytes.  Without such a modifier the width is 4
    bytes.  `.LTC128B` is no width, but an L2 hint."""
    return next((_SUFFIX_BYTES[suffix] for suffix in opcode.split(".")[1:] if suffix in _SUFFIX_BYTES), _DEFAULT_BYTES)


def parse(text: str) -> dict[str, SassFunction]:
    """Parses every function in `text`, and returns them by name.  Raises `ValueError` if there is no function."""
    function_readings: dict[str, _Reading] = {}
    current_parser: _Reading | None = None
    for sass_line in text.splitlines():
        heading_match = _FUNCTION_HEADING.match(sass_line)
        if heading_match:
            current_parser = function_readings.setdefault(heading_match[1] or heading_match[2], _Reading())
        elif current_parser is not None:
            current_parser.read(sass_line)
    if not any(parser.instructions for parser in function_readings.values()):
        raise ValueError(f"sass: expected what cuobjdump or nvdisasm print, got {text[:60]!r}")
    return {
        name: SassFunction(name, tuple(parser.instructions), parser.labels)
        for name, parser in function_readings.items()
        if parser.instructions
    }


def parse_code(text: str) -> tuple[SassInstruction, ...]:
    """Parses the instructions of one kernel; the text may have a heading.  Raises `ValueError` without instructions."""
    (function,) = parse(f" Function : kernel\n{text}").values()
    return function.instructions


class _Reading:
    """Holds the parser's state: the part of a function that was read so far."""

    def __init__(self) -> None:
        self.instructions: list[SassInstruction] = []
        self.labels: dict[str, int] = {}
        self.pending: list[str] = []

    def read(self, line: str) -> None:
        label = _LABEL_LINE.match(line)
        if label:
            self.pending.append(label[1])
            return
        fields = _INSTRUCTION_LINE.match(line)
        if not fields:
            return
        address, guard, opcode, operand_text = int(fields[1], 16), fields[2] or "", fields[3].rstrip("."), fields[4]
        self.labels.update(dict.fromkeys(self.pending, address))
        self.pending = []
        operands = " ".join(_COMMENT.sub("", operand_text.partition(";")[0]).split())
        self.instructions.append(SassInstruction(address, guard, opcode, operands))


def count_families(opcodes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Counts the instructions of each family in `FAMILIES`.  `opcodes` holds pairs of an opcode and its count."""
    family_counts = dict.fromkeys(FAMILIES, 0)
    for opcode, opcode_count in opcodes:
        family = _OPCODE_FAMILY.get(opcode.partition(".")[0])
        if family is not None:
            family_counts[family] += opcode_count
    return family_counts


def widths(opcodes: Iterable[tuple[str, int]], *names: str) -> tuple[int | None, int | None]:
    """Returns the smallest and the most frequent width of the instructions `names`, in bytes per thread.

    `opcodes` holds pairs of an opcode and its count.  If two widths are equally frequent, the smaller one is returned.
    If no opcode matches, both results are None."""
    count_by_width: dict[int, int] = {}
    for opcode, opcode_count in opcodes:
        if opcode.partition(".")[0] in names:
            width = width_bytes(opcode)
            count_by_width[width] = count_by_width.get(width, 0) + opcode_count
    return min(count_by_width, default=None), min(
        count_by_width, key=lambda width: (-count_by_width[width], width), default=None
    )
