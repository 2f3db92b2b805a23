"""Reads the body of a kernel into one list of instructions; a called function is read anew in the place of its call."""

from __future__ import annotations

import re

from rooflab.bench.ptx.text import declarations, operands
from rooflab.bench.ptx.text.statements import Function, statements
from rooflab.bench.ptx.text.syntax import (
    Immediate,
    Instruction,
    Label,
    Operand,
    Parameter,
    Place,
    PtxError,
    Register,
    Symbol,
    Variable,
)

_INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([\w$%]+)\s+)?([\w.:$]+)\s*(.*)$", re.DOTALL)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_CALLED = re.compile(r" called (\S+) (\d+)")
_FAMILY = re.compile(r"(.*?)(\d+)$")
HOST_CALLS = ("vprintf", "__assertfail", "__cuda_assertfail")
"""Functions of the driver: a call of one is an instruction to the emulator."""


class Scope:
    """Names of one pair of braces."""

    def __init__(self, number: int):
        self.number = number
        self.names: dict[str, Register] = {}
        self.families: dict[str, tuple[str, int]] = {}
        """Type and count by prefix: thousands are declared, and those that occur are made when they do."""
        self.variables: dict[str, str] = {}


class Body:
    """Collects instructions, registers, labels and variables."""

    def __init__(self, functions: dict[str, Function], files: dict[int, str], outer: dict[str, Variable]):
        self.registers: list[Register] = []
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.variables = dict(outer)
        self._functions = functions
        self._files = files
        self._scopes: list[Scope] = []
        self._count = 0
        self._place: Place | None = None
        self._ends: list[str] = []
        """Labels behind the calls that are being read."""
        self._calls: list[str] = []
        self._parameters: set[str] = set()

    def enter_kernel(self, parameters: list[Parameter]) -> None:
        """Makes the kernel's parameters known."""
        self._parameters = {parameter.name for parameter in parameters}

    def read(self, text: str) -> None:
        """Reads the statements of a body in a scope of its own."""
        base = len(self._scopes)
        self._scopes.append(self._new_scope())
        for kind, statement in statements(text):
            if kind == "open":
                self._scopes.append(self._new_scope())
            elif kind == "close":
                self._scopes.pop()
            elif kind == "label":
                self._label(statement)
            elif kind == "line":
                self._line(statement)
            else:
                self._statement(statement)
        if len(self._scopes) != base + 1:
            raise PtxError("PTX: expected as many '}' as '{' in a body")
        self._scopes.pop()

    def _new_scope(self) -> Scope:
        self._count += 1
        return Scope(self._count)

    def _label(self, name: str) -> None:
        self.labels[f"{name}@{self._scopes[-1].number}"] = len(self.instructions)

    def _line(self, text: str) -> None:
        if found := _LOC.match(text):
            file, line, caller, at = found.groups()
            name = self._files.get(int(file), f"file {file}")
            outer = (self._files.get(int(caller), f"file {caller}"), int(at)) if caller else None
            if called := _CALLED.search(text):
                outer = (self._full_name(called[1]), int(called[2]))
            # Line 0 is code that the compiler made for no line.
            self._place = Place(name, int(line), outer) if int(line) else self._place

    def _full_name(self, name: str) -> str:
        return next((path for path in self._files.values() if path.rsplit("/", 1)[-1] == name), name)

    def _statement(self, text: str) -> None:
        if text.startswith((".pragma", ".noreturn")):
            return
        if (found := declarations.registers(text)) is not None:
            for name, count in found[1]:
                if count is None:
                    self._scopes[-1].names[name] = self._register(name, found[0])
                else:
                    self._scopes[-1].families[name] = (found[0], count)
        elif text.startswith((".callprototype", ".calltargets")):
            raise PtxError(f"PTX: expected calls of functions by their names, got one by a pointer at {self._place}")
        elif text.startswith(".branchtargets"):
            self._table(text)
        elif (declared := declarations.variable(text)) is not None:
            space = "local" if declared.space == "param" else declared.space
            self._declare(declared.name, declared.size, declared.align, space)
        elif text.startswith("."):
            raise PtxError(f"PTX: expected a directive that is known, got {text!r}")
        else:
            self._instruction(text)

    def _declare(self, name: str, size: int, align: int, space: str) -> str:
        unique = f"{name}@{self._scopes[-1].number}"
        self._scopes[-1].variables[name] = unique
        self.variables[unique] = Variable(unique, space, size, align)
        return unique

    def _table(self, text: str) -> None:
        # The label before it is the table's name, not a place in the code.
        key = next(reversed(self.labels))
        del self.labels[key]
        names = [self._label_key(name) for name in operands.split(text.removeprefix(".branchtargets"))]
        self.tables[key] = tuple(names)

    def _label_key(self, name: str) -> str:
        """Labels may come later, so that a name's scope is found by `link`; until then every scope is open to it."""
        return "|".join([name, *(str(scope.number) for scope in reversed(self._scopes))])

    def _register(self, name: str, kind: str) -> Register:
        register = Register(len(self.registers), name, kind)
        self.registers.append(register)
        return register

    def _resolve(self, name: str) -> Operand:
        special = operands.special(name)
        for scope in reversed(self._scopes):
            if name in scope.names:
                return scope.names[name]
            if name in scope.variables:
                return Symbol(scope.variables[name])
            found = _FAMILY.match(name)
            if found and found[1] in scope.families and int(found[2]) < scope.families[found[1]][1]:
                scope.names[name] = self._register(name, scope.families[found[1]][0])
                return scope.names[name]
        if special is not None:
            return special
        if name == "WARP_SZ":
            return Immediate(32)
        if name in self.variables or name in self._parameters:
            return Symbol(name)
        raise PtxError(f"PTX: expected a name that is declared, got {name!r}")

    def _instruction(self, text: str) -> None:
        found = _INSTRUCTION.match(text)
        if found is None:
            raise PtxError(f"PTX: expected an instruction, got {text!r}")
        negated, guard, opcode, rest = found.groups()
        predicate = None
        if guard is not None:
            resolved = self._resolve(guard)
            if not isinstance(resolved, Register):
                raise PtxError(f"PTX: expected a predicate, got {guard!r} in {text!r}")
            predicate = resolved
        family = opcode.split(".")[0]
        if family == "call":
            self._call(opcode, rest, text, predicate, negated == "!")
            return
        if family == "ret" and self._ends:
            self._add(
                "bra.uni" if predicate is None else "bra", (Label(self._ends[-1]),), predicate, negated == "!", text
            )
            return
        own: tuple[Operand, ...]
        if family == "bra":
            own = (Label(self._label_key(rest.strip())),)
        elif family == "brx":
            index, table = operands.split(rest)
            own = (operands.parse(index, self._resolve), Label(self._label_key(table)))
        else:
            own = tuple(operands.parse(item, self._resolve) for item in operands.split(rest))
        self._add(opcode, own, predicate, negated == "!", " ".join(text.split()))

    def _add(self, opcode: str, own: tuple[Operand, ...], predicate: Register | None, negated: bool, text: str) -> None:
        self.instructions.append(
            Instruction(len(self.instructions), opcode, own, predicate, negated, self._place, text)
        )

    def _call(self, opcode: str, rest: str, text: str, predicate: Register | None, negated: bool) -> None:
        items = operands.split(rest)
        returns = operands.split(items.pop(0)[1:-1]) if items[0].startswith("(") else []
        name = items.pop(0)
        given = operands.split(items.pop(0)[1:-1]) if items else []
        if name in HOST_CALLS:
            self._add(f"call.{name}", tuple(self._resolve(item) for item in given), predicate, negated, text)
            return
        if name not in self._functions:
            plain = " ".join(text.split())
            raise PtxError(f"PTX: expected a call of a function with a body, got {plain!r} at {self._place}")
        if name in self._calls or predicate is not None:
            plain = f"{' '.join(text.split())!r} at {self._place}"
            raise PtxError(f"PTX: expected a call that is neither recursive nor guarded, got {plain}")
        function = self._functions[name]
        variables: dict[str, str] = {}
        wanted = [*operands.split(function.returns), *operands.split(function.parameters)]
        if len(wanted) != len(returns) + len(given):
            raise PtxError(f"PTX: expected {len(wanted)} parameters and results of {name}, got {text!r}")
        for declared, value in zip(wanted, [*returns, *given], strict=True):
            found, actual = declarations.variable(declared), self._resolve(value)
            if found is None or not isinstance(actual, Symbol):
                raise PtxError(f"PTX: expected parameters in the .param space, got {text!r}")
            variables[found.name] = actual.name
        self._inline(function, variables)

    def _inline(self, function: Function, variables: dict[str, str]) -> None:
        self._count += 1
        end = f"end of {function.name}@{self._count}"
        self._calls.append(function.name)
        self._ends.append(end)
        outer, place = self._scopes, self._place
        scope = self._new_scope()
        scope.variables |= variables
        self._scopes = [scope]
        self.read(function.body)
        self._scopes, self._place = outer, place
        self._ends.pop()
        self._calls.pop()
        self.labels[end] = len(self.instructions)


def find_label(labels: dict[str, int], name: str) -> str:
    """The key in `labels` that a branch's target means.  Raises `PtxError` where there is none."""
    if name in labels:
        return name
    target, *scopes = name.split("|")
    for scope in scopes:
        if f"{target}@{scope}" in labels:
            return f"{target}@{scope}"
    raise PtxError(f"PTX: expected a label, got {target!r}, which stands nowhere")
