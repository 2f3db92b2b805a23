"""SASS as `cuobjdump -sass` and `nvdisasm -c` print it: functions, instructions, the families that matter, and how wide
an access is.  The first prints a branch's target as an address, the second as a label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
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
"""Families of instructions by their opcode's part before the first dot.

`tma` is what the tensor memory accelerator moves, `cp_async` Ampere's copies past the registers, `fma` what stands for
a matrix product where no tensor core is used.
"""
TENSOR_CORES = ("tcgen05", "wgmma", "mma")
"""Families of tensor-core instructions, the newest first."""
_FAMILY_OF = {opcode: family for family, opcodes in FAMILIES.items() for opcode in opcodes}
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_DEFAULT_WIDTH = 4

_FUNCTION = re.compile(r"^(?:\.text\.(\S+):|\s+Function : (\S+))$")
_LABEL = re.compile(r"^([.$\w][\w.$@]*):\s*$")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*)$")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction."""

    address: int
    guard: str
    """`@!P0`; empty where it always executes."""
    opcode: str
    """`LDG.E.128`, modifiers included."""
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def family(self) -> str | None:
        """A key of `FAMILIES`, or None."""
        return _FAMILY_OF.get(self.name)

    @property
    def width_bytes(self) -> int:
        """Bytes a thread moves with it, for a load or a store: 4 unless a modifier says otherwise."""
        return width_bytes(self.opcode)


@dataclass(frozen=True)
class Function:
    """One kernel's code."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int] = field(default_factory=dict)
    """Address by label; empty where the text has none."""
    indirect: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Where each indirect branch may go, by its address; only `nvdisasm` says so."""


def width_bytes(opcode: str) -> int:
    """Bytes a thread moves with a load or store of this opcode.

    Only whole modifiers count: `LDG.E.LTC128B` has a hint for the L2 cache and loads 4 bytes.
    """
    return next((_WIDTHS[part] for part in opcode.split(".")[1:] if part in _WIDTHS), _DEFAULT_WIDTH)


def parse(text: str) -> dict[str, Function]:
    """Every function in `text`, by name.  Raises `ValueError` where there is none."""
    found: dict[str, _Reading] = {}
    current: _Reading | None = None
    for line in text.splitlines():
        section = _FUNCTION.match(line)
        if section:
            current = found.setdefault(section[1] or section[2], _Reading())
        elif current is not None:
            current.read(line)
    if not any(reading.instructions for reading in found.values()):
        raise ValueError(f"sass: expected what cuobjdump or nvdisasm print, got {text[:60]!r}")
    return {name: reading.function(name) for name, reading in found.items() if reading.instructions}


class _Reading:
    """A function as far as it has been read."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.indirect: dict[int, list[str]] = {}
        self.pending: list[str] = []

    def read(self, line: str) -> None:
        label = _LABEL.match(line)
        if label:
            self.pending.append(label[1])
            return
        parts = _INSTRUCTION.match(line)
        if not parts:
            return
        address, guard, opcode, rest = int(parts[1], 16), parts[2] or "", parts[3].rstrip("."), parts[4]
        self.labels.update(dict.fromkeys(self.pending, address))
        self.pending = []
        targets = _TARGETS.search(rest)
        if targets:
            self.indirect[address] = [label.strip() for label in targets[1].split(",")]
        operands = rest.partition(";")[0].partition("(*")[0].strip()
        self.instructions.append(Instruction(address, guard, opcode, operands))

    def function(self, name: str) -> Function:
        indirect = {
            address: tuple(self.labels[label] for label in labels if label in self.labels)
            for address, labels in self.indirect.items()
        }
        return Function(name, tuple(self.instructions), self.labels, indirect)


def count_families(opcodes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Instructions of every family of `FAMILIES`, from opcodes and how often each occurs."""
    counts = dict.fromkeys(FAMILIES, 0)
    for opcode, number in opcodes:
        family = _FAMILY_OF.get(opcode.partition(".")[0])
        if family is not None:
            counts[family] += number
    return counts


@dataclass(frozen=True)
class Widths:
    """Bytes a thread moves in one instruction."""

    worst: int | None
    """The narrowest; None where there is no such instruction."""
    usual: int | None
    """The most frequent; the narrower of two that are as frequent."""


def widths(opcodes: Iterable[tuple[str, int]], *names: str) -> Widths:
    """The widths of the instructions called `names`, from opcodes and how often each occurs."""
    counts: dict[int, int] = {}
    for opcode, number in opcodes:
        if opcode.partition(".")[0] in names:
            width = width_bytes(opcode)
            counts[width] = counts.get(width, 0) + number
    if not counts:
        return Widths(None, None)
    return Widths(min(counts), min(counts, key=lambda width: (-counts[width], width)))
