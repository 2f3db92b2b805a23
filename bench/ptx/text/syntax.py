"""What a PTX text says, as values: operands, instructions, declarations, kernels (PTX ISA 8.7, sections 4 to 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class PtxError(ValueError):
    """A PTX text that is wrong, or that says what the emulator does not know."""


class Place(NamedTuple):
    """Where an instruction comes from: `.loc` and its `inlined_at`."""

    file: str
    line: int
    caller: tuple[str, int] | None = None
    """File and line of the outermost call, where the line is of a function inlined there."""

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        if self.caller is None:
            return f"{name}:{self.line}"
        return f"{self.caller[0].rsplit('/', 1)[-1]}:{self.caller[1]} (in {name}:{self.line})"


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register of a kernel: its place in the register file, its name and its declared type (`b32`)."""

    index: int
    name: str
    type: str


class Immediate(NamedTuple):
    """A constant: an integer, or the bits of a float as it was written (`0f...` has 32, `0d...` has 64)."""

    value: int
    float_bits: int = 0


class Special(NamedTuple):
    """A special register: `%tid.x`."""

    name: str


class Symbol(NamedTuple):
    """The address of a variable or parameter, and so many bytes beyond it."""

    name: str
    offset: int = 0


class Address(NamedTuple):
    """`[base + offset]`."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()
    """Of a tensor operand: `[map, {c0, c1}]`."""


class Group(NamedTuple):
    """`{a, b}`, or `a|b`."""

    items: tuple[Operand, ...]


class Sink(NamedTuple):
    """`_`: a result that nobody wants."""


class Label(NamedTuple):
    """The target of a branch."""

    name: str


class Negated(NamedTuple):
    """`!p`."""

    register: Register


Operand = Register | Immediate | Special | Symbol | Address | Group | Sink | Label | Negated


def registers_of(operand: Operand) -> Iterator[Register]:
    """The registers that an operand names."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Group):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Address):
        if isinstance(operand.base, Register):
            yield operand.base
        for item in operand.coordinates:
            yield from registers_of(item)


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    number: int
    """Its place in its kernel."""
    opcode: str
    """Modifiers included: `ld.global.v4.b32`."""
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    place: Place | None
    text: str

    @property
    def parts(self) -> list[str]:
        """The opcode without the dots."""
        return self.opcode.split(".")

    def describe(self) -> str:
        """`tensor_core.py:120 (ld.global.b32)`."""
        return f"{self.place} ({self.opcode})" if self.place else f"instruction {self.number} ({self.text})"


class Reference(NamedTuple):
    """An address among the bytes that a variable begins with."""

    at: int
    """Place of its first byte there."""
    size: int
    symbol: str
    offset: int
    mask: int
    """Of the address only these bits are taken, shifted down (`0xFF00(table)`)."""


@dataclass(frozen=True)
class Variable:
    """A declared variable: of a module, a kernel, or a call's parameter."""

    name: str
    space: str
    """`shared`, `global`, `const`, `local` or `param`."""
    size: int
    """Bytes; 0 where the launch decides (`extern .shared`)."""
    align: int
    initial: bytes = b""
    references: tuple[Reference, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel."""

    name: str
    type: str
    size: int
    align: int
    is_pointer: bool = False


@dataclass
class Kernel:
    """An entry, with every function that it calls in place."""

    name: str
    parameters: list[Parameter]
    registers: list[Register]
    instructions: list[Instruction]
    labels: dict[str, int]
    """By name, the number of the instruction that follows; past the last for one at the end."""
    tables: dict[str, tuple[str, ...]]
    """`.branchtargets`: the labels that a `brx.idx` may go to."""
    variables: dict[str, Variable]
    """Its own and its module's."""
    block: tuple[int, int, int] | None = None
    """`.reqntid`: the threads of every CTA."""
    most_threads: int | None = None
    """`.maxntid`, multiplied out, which is all that it promises."""
    cluster: tuple[int, int, int] | None = None
    max_registers: int | None = None


@dataclass
class Module:
    """A PTX text."""

    version: str
    target: str
    entries: dict[str, Callable[[], Kernel]] = field(default_factory=dict)
    """What reads each kernel."""
    files: Mapping[int, str] = field(default_factory=dict)

    def kernel(self, name: str) -> Kernel:
        """The entry called `name`.  Raises `PtxError` where there is none."""
        if name not in self.entries:
            raise PtxError(f"kernel: expected one of {', '.join(self.entries) or 'none'} in the PTX, got {name!r}")
        return self.entries[name]()


WIDTHS = {"pred": 1} | {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64, 128)}
"""Bytes of a value by its type."""
