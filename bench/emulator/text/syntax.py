"""Defines the types of a parsed PTX text: operands, instructions, declarations, kernels (PTX ISA 8.7, sections 4-7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

SizeTriple = tuple[int, int, int]
"""The sizes along the dimensions x, y and z."""
TYPE_WIDTHS = {"pred": 1} | {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64, 128)}
"""By type, the bytes of a value."""
NO_RESULT_FAMILIES = frozenset(
    "st bra brx ret exit trap bar barrier fence membar red wgmma_wait cp prefetch prefetchu setmaxnreg nanosleep call"
    " stmatrix discard applypriority tensormap griddepcontrol pmevent brkpt isspacep_none stackrestore".split()
)
"""The families of instructions that write no register."""


class PtxError(ValueError):
    """Reports that a PTX text is wrong, or contains something that the emulator does not know."""


class Place(NamedTuple):
    """Holds the source position of an instruction, from `.loc` and its `inlined_at`."""

    file: str
    line: int
    caller: tuple[str, int] | None = None
    """If `line` is in an inlined function: file and line of the outermost call."""

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        if self.caller is None:
            return f"{name}:{self.line}"
        return f"{self.caller[0].rsplit('/', 1)[-1]}:{self.caller[1]} (in {name}:{self.line})"


def quoted(text: str, place: Place | None) -> str:
    """Returns a statement for an error message: its text on one line, and its source line if known."""
    return f"{' '.join(text.split())!r}" + (f" at {place}" if place else "")


@dataclass(frozen=True, slots=True)
class Register:
    """Describes a virtual register: its index in the register file, its name and its declared type (`b32`)."""

    index: int
    name: str
    type: str


class Immediate(NamedTuple):
    """Holds a constant: an integer, or the bits of a float (32 bits for `0f...`, 64 bits for `0d...`)."""

    value: int
    float_bits: int = 0


class Special(NamedTuple):
    """Names a special register, such as `%tid.x`."""

    name: str


class Symbol(NamedTuple):
    """Describes the address of a variable or parameter, plus `offset` bytes."""

    name: str
    offset: int = 0


class Address(NamedTuple):
    """Describes an address operand: `[base + offset]`."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()
    """The coordinates of a tensor operand: `[map, {c0, c1}]`."""


class OperandGroup(NamedTuple):
    """Holds a group of operands: `{a, b}` or `a|b`."""

    items: tuple[Operand, ...]


class Sink(NamedTuple):
    """Stands for the operand `_`, which discards a result."""


class Label(NamedTuple):
    """Names the target of a branch."""

    name: str


class Negated(NamedTuple):
    """Describes a negated predicate: `!p`."""

    register: Register


Operand = Register | Immediate | Special | Symbol | Address | OperandGroup | Sink | Label | Negated


def registers_of(operand: Operand) -> Iterator[Register]:
    """Returns the registers that an operand contains."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, OperandGroup):
        for group_item in operand.items:
            yield from registers_of(group_item)
    elif isinstance(operand, Address):
        if isinstance(operand.base, Register):
            yield operand.base
        for group_item in operand.coordinates:
            yield from registers_of(group_item)


@dataclass(frozen=True)
class Instruction:
    """Describes one instruction of a kernel."""

    number: int
    """The index of the instruction in its kernel."""
    opcode: str
    """The opcode with its modifiers: `ld.global.v4.b32`."""
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    place: Place | None
    text: str

    @property
    def parts(self) -> list[str]:
        """Returns the parts of the opcode, without the dots."""
        return self.opcode.split(".")

    @property
    def source_line(self) -> tuple[str, int]:
        """Returns the file and the line: for a line of an inlined function, of its call in the kernel's own source."""
        return ("", 0) if self.place is None else self.place.caller or (self.place.file, self.place.line)

    def describe(self) -> str:
        """Returns the source line and the opcode as text: `tensor_core.py:120 (ld.global.b32)`."""
        return f"{self.place} ({self.opcode})" if self.place else f"instruction {self.number} ({self.text})"


class Reference(NamedTuple):
    """Describes one address inside the initial value of a variable: the address of `symbol`, plus `offset` bytes."""

    at: int
    """The index of the address's first byte in the variable."""
    size: int
    symbol: str
    offset: int
    mask: int
    """The bits of the address that the variable holds, shifted down to bit 0 (for `0xFF00(table)`)."""


@dataclass(frozen=True)
class Variable:
    """Describes a variable.  A module or a kernel declares it, or it holds a parameter of a call."""

    name: str
    space: str
    """The state space: `shared`, `global`, `const`, `local` or `param`."""
    size: int
    """The size in bytes; 0 if the launch decides (`extern .shared`)."""
    align: int
    initial: bytes = b""
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """Describes a parameter of a kernel."""

    name: str
    type: str
    size: int
    align: int


@dataclass
class PtxKernel:
    """Holds a kernel (a `.entry` of a module), with the functions that it calls inlined."""

    name: str
    parameters: list[Parameter]
    registers: list[Register]
    instructions: list[Instruction]
    labels: dict[str, int]
    """By name, the number of the instruction after the label.  For a label at the end, the count of instructions."""
    tables: dict[str, tuple[str, ...]]
    """By name of a `.branchtargets` table: the labels that a `brx.idx` may jump to."""
    variables: dict[str, Variable]
    """By name, the variables of the kernel and of its module."""
    block: SizeTriple | None = None
    """The numbers of threads of every CTA, from `.reqntid`."""
    most_threads: int | None = None
    """The most threads that a CTA may have: the product of the numbers in `.maxntid`."""
    cluster: SizeTriple | None = None
    max_registers: int | None = None


@dataclass
class Module:
    """Holds a parsed PTX text."""

    version: str
    entries: dict[str, Callable[[], PtxKernel]] = field(default_factory=dict)
    """By name of a kernel, a function that parses the kernel."""

    def kernel(self, name: str) -> PtxKernel:
        """Returns the kernel called `name`.  Raises `PtxError` if the module has no such kernel."""
        if name not in self.entries:
            raise PtxError(f"kernel: expected one of {', '.join(self.entries) or 'none'} in the PTX, got {name!r}")
        return self.entries[name]()


def definitions(instruction: Instruction) -> list[Register]:
    """Returns the registers that an instruction writes."""
    result = _result(instruction)
    return [] if result is None else list(registers_of(result))


def uses(instruction: Instruction) -> list[Register]:
    """Returns the registers that an instruction reads, its predicate included.  A wgmma also reads its accumulators."""
    registers = [] if instruction.predicate is None else [instruction.predicate]
    # Results are told from operands by position, because one register may be both.
    for operand in instruction.operands[0 if _result(instruction) is None else 1 :]:
        registers += registers_of(operand)
    if instruction.opcode.startswith("wgmma.mma_async"):
        registers += registers_of(instruction.operands[0])
    return registers


def _result(instruction: Instruction) -> Operand | None:
    name, first_operand = instruction.opcode.split(".", 1)[0], next(iter(instruction.operands), None)
    if name in NO_RESULT_FAMILIES or (name == "wgmma" and not instruction.opcode.startswith("wgmma.mma_async")):
        return None
    # mbarrier.init, inval, expect_tx and complete_tx write no register: their first operand is an address.
    return first_operand if isinstance(first_operand, Register | OperandGroup) else None
