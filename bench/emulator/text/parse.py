"""Parses PTX into kernels.  Gives unique names to labels and scopes, inlines called functions, and keeps source lines.

The grammar follows PTX ISA 8.7, sections 4 to 7 and 11.  An unknown construct raises `PtxError`; the parser skips
nothing.  A called function is parsed again for each call.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache, partial

from rooflab.bench.emulator.text import syntax
from rooflab.bench.emulator.text.statements import (
    SPECIAL_REGISTERS,
    Function,
    declared_parameters,
    declared_registers,
    declared_variable,
    parse_operand,
    split,
    split_module,
    statements,
    strip_comments,
)

_INSTRUCTION_PATTERN = re.compile(r"(?:@\s*(!?)\s*([\w$%]+)\s+)?([\w.:$]+)\s*(.*)$", re.DOTALL)
_LOC_PATTERN = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_CALLER_PATTERN = re.compile(r" called (\S+) (\d+)")
_NUMBERED_NAME_PATTERN = re.compile(r"(.*?)(\d+)$")
Guard = tuple[syntax.Register | None, bool]
"""The predicate of an instruction, and whether it is negated."""
HOST_FUNCTIONS = ("vprintf", "__assertfail", "__cuda_assertfail")
"""Functions of the driver: the emulator treats a call of such a function as an instruction."""
SM_REGISTERS = 65536
"""The number of registers of an SM."""
MAX_THREAD_REGISTERS = 256
"""The most registers of a thread, 255, rounded up to the unit of allocation, 8."""
TARGETS = ("sm_90", "sm_90a")
"""The targets that the emulator accepts.  They have all instructions of older targets, and none of Blackwell's own."""


class Scope:
    """Holds the names that are declared within one pair of braces."""

    def __init__(self, number: int):
        self.number = number
        self.names: dict[str, syntax.Register | syntax.Symbol] = {}
        """Registers and variables."""
        self.families: dict[str, tuple[str, int]] = {}
        """By prefix of register names: type and count.  A kernel declares thousands; each is made at its first use."""


class Body:
    """Collects the instructions, registers, labels and variables of a function's body."""

    def __init__(
        self,
        functions: dict[str, Function],
        files: dict[int, str],
        outer: dict[str, syntax.Variable],
        parameters: list[syntax.Parameter],
    ):
        self.registers: list[syntax.Register] = []
        self.instructions: list[syntax.Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.variables = dict(outer)
        self._functions = functions
        self._files = files
        self._scopes: list[Scope] = []
        self._count = 0
        self._place: syntax.Place | None = None
        self._inlined: dict[tuple[str, ...], tuple[str, ...]] = {}
        """By the place of a call inside an inlined function: file, line and column of the outermost call around it."""
        self._calls: dict[str, str] = {}
        """By name of each called function that the parser is reading: the label after the call; the innermost last."""
        self._parameters = {parameter.name for parameter in parameters}

    def read(self, text: str) -> None:
        """Reads the statements of a body in a new scope."""
        base_depth = len(self._scopes)
        self._scopes.append(self._new_scope())
        for statement_kind, statement in statements(text):
            if statement_kind == "open":
                self._scopes.append(self._new_scope())
            elif statement_kind == "close":
                self._scopes.pop()
            elif statement_kind == "label":
                self.labels[f"{statement}@{self._scopes[-1].number}"] = len(self.instructions)
            elif statement_kind == "line":
                self._line(statement)
            else:
                self._statement(statement)
        if len(self._scopes) != base_depth + 1:
            raise syntax.PtxError("PTX: expected as many '}' as '{' in a body")
        self._scopes.pop()

    def _new_scope(self) -> Scope:
        self._count += 1
        return Scope(self._count)

    def _line(self, text: str) -> None:
        if loc_match := _LOC_PATTERN.match(text):
            file_no, line_no, column, *call = loc_match.groups()
            name, outer_call = self._files.get(int(file_no), f"file {file_no}"), None
            if call[0]:
                self._inlined[file_no, line_no, column] = caller, caller_line, _ = self._inlined.get((*call,), (*call,))
                outer_call = self._files.get(int(caller), f"file {caller}"), int(caller_line)
            if caller_match := _CALLER_PATTERN.search(text):
                outer_call = (self._full_name(caller_match[1]), int(caller_match[2]))
            # Line 0 marks code without a source line.
            self._place = syntax.Place(name, int(line_no), outer_call) if int(line_no) else self._place

    def _full_name(self, name: str) -> str:
        return next((file_path for file_path in self._files.values() if file_path.rsplit("/", 1)[-1] == name), name)

    def _statement(self, text: str) -> None:
        if text.startswith((".pragma", ".noreturn")):
            return
        if (registers := declared_registers(text)) is not None:
            for name, register_count in registers[1]:
                if register_count is None:
                    self._scopes[-1].names[name] = self._register(name, registers[0])
                else:
                    self._scopes[-1].families[name] = (registers[0], register_count)
        elif text.startswith((".callprototype", ".calltargets")):
            call_text = syntax.quoted(text, self._place)
            raise syntax.PtxError(f"PTX: expected calls of functions by their names, got one by a pointer: {call_text}")
        elif text.startswith(".branchtargets"):
            self._table(text)
        elif (variable := declared_variable(text)) is not None:
            state_space = "local" if variable.space == "param" else variable.space
            self._declare(variable.name, variable.size, variable.align, state_space)
        elif text.startswith("."):
            raise syntax.PtxError(f"PTX: expected a directive that is known, got {text!r}")
        else:
            self._instruction(text)

    def _declare(self, name: str, size: int, align: int, space: str) -> str:
        unique_name = f"{name}@{self._scopes[-1].number}"
        self._scopes[-1].names[name] = syntax.Symbol(unique_name)
        self.variables[unique_name] = syntax.Variable(unique_name, space, size, align)
        return unique_name

    def _table(self, text: str) -> None:
        # The label before the table is its name, not a place in the code.
        jump_table_name = next(reversed(self.labels))
        del self.labels[jump_table_name]
        names = [self._label_key(name) for name in split(text.removeprefix(".branchtargets"))]
        self.tables[jump_table_name] = tuple(names)

    def _label_key(self, name: str) -> str:
        """Returns the key of a PTX label, such as `name|2|1`. It holds the label's name and the numbers of all open
        scopes, the innermost first. `find_label` searches for this key."""
        return "|".join([name, *(str(open_scope.number) for open_scope in reversed(self._scopes))])

    def _register(self, name: str, kind: str) -> syntax.Register:
        register = syntax.Register(len(self.registers), name, kind)
        self.registers.append(register)
        return register

    def _resolve(self, name: str) -> syntax.Operand:
        for open_scope in reversed(self._scopes):
            if name in open_scope.names:
                return open_scope.names[name]
            match = _NUMBERED_NAME_PATTERN.match(name)
            if match and match[1] in open_scope.families and int(match[2]) < open_scope.families[match[1]][1]:
                open_scope.names[name] = self._register(name, open_scope.families[match[1]][0])
                return open_scope.names[name]
        if SPECIAL_REGISTERS.match(name):
            return syntax.Special(name[1:])
        if name == "WARP_SZ":
            return syntax.Immediate(32)
        if name in self.variables or name in self._parameters:
            return syntax.Symbol(name)
        raise syntax.PtxError(f"PTX: expected a name that is declared, got {name!r}")

    def _instruction(self, text: str) -> None:
        instruction_match = _INSTRUCTION_PATTERN.match(text)
        if instruction_match is None:
            raise syntax.PtxError(f"PTX: expected an instruction, got {text!r}")
        negation_mark, guard_register, opcode, operand_text = instruction_match.groups()
        predicate = None
        if guard_register is not None:
            guard_operand = self._resolve(guard_register)
            if not isinstance(guard_operand, syntax.Register):
                raise syntax.PtxError(f"PTX: expected a predicate, got {guard_register!r} in {text!r}")
            predicate = guard_operand
        guard = predicate, negation_mark == "!"
        opcode_family = opcode.split(".")[0]
        if opcode_family == "call":
            self._call(operand_text, text, guard)
            return
        if opcode_family == "ret" and self._calls:
            opcode = "bra.uni" if predicate is None else "bra"
            self._add(opcode, (syntax.Label([*self._calls.values()][-1]),), guard, text)
            return
        operands: tuple[syntax.Operand, ...]
        if opcode_family == "bra":
            operands = (syntax.Label(self._label_key(operand_text.strip())),)
        elif opcode_family == "brx":
            index_text, table_name = split(operand_text)
            operands = (parse_operand(index_text, self._resolve), syntax.Label(self._label_key(table_name)))
        else:
            operands = tuple(parse_operand(operand, self._resolve) for operand in split(operand_text))
        self._add(opcode, operands, guard, " ".join(text.split()))

    def _add(self, opcode: str, operands: tuple[syntax.Operand, ...], guard: Guard, text: str) -> None:
        number = len(self.instructions)
        self.instructions.append(syntax.Instruction(number, opcode, operands, *guard, self._place, text))

    def _call(self, rest: str, text: str, guard: Guard) -> None:
        operand_texts = split(rest)
        result_names = split(operand_texts.pop(0)[1:-1]) if operand_texts[0].startswith("(") else []
        name = operand_texts.pop(0)
        arguments = split(operand_texts.pop(0)[1:-1]) if operand_texts else []
        if name in HOST_FUNCTIONS:
            self._add(f"call.{name}", tuple(self._resolve(operand) for operand in arguments), guard, text)
            return
        quoted_text = syntax.quoted(text, self._place)
        if name not in self._functions:
            raise syntax.PtxError(f"PTX: expected a call of a function with a body, got {quoted_text}")
        if name in self._calls or guard[0] is not None:
            raise syntax.PtxError(f"PTX: expected a call that is neither recursive nor guarded, got {quoted_text}")
        function = self._functions[name]
        variables: dict[str, syntax.Symbol] = {}
        parameters = [*split(function.returns), *split(function.parameters)]
        if len(parameters) != len(result_names) + len(arguments):
            raise syntax.PtxError(f"PTX: expected {len(parameters)} parameters and results of {name}, got {text!r}")
        for parameter_text, value_text in zip(parameters, [*result_names, *arguments], strict=True):
            parameter, actual_symbol = declared_variable(parameter_text), self._resolve(value_text)
            if parameter is None or not isinstance(actual_symbol, syntax.Symbol):
                raise syntax.PtxError(f"PTX: expected parameters in the .param space, got {text!r}")
            variables[parameter.name] = actual_symbol
        self._inline(function, variables)

    def _inline(self, function: Function, variables: dict[str, syntax.Symbol]) -> None:
        self._count += 1
        end_label = f"end of {function.name}@{self._count}"
        self._calls[function.name] = end_label
        caller_scopes, caller_place = self._scopes, self._place
        inline_scope = self._new_scope()
        inline_scope.names |= variables
        self._scopes = [inline_scope]
        self.read(function.body)
        self._scopes, self._place = caller_scopes, caller_place
        del self._calls[function.name]
        self.labels[end_label] = len(self.instructions)


def find_label(labels: dict[str, int], name: str) -> str:
    """Returns the key in `labels` for the branch target `name`.  Raises `PtxError` if there is no such label."""
    if name in labels:
        return name
    target_name, *scope_numbers = name.split("|")
    for scope_number in scope_numbers:
        if f"{target_name}@{scope_number}" in labels:
            return f"{target_name}@{scope_number}"
    raise syntax.PtxError(f"PTX: expected a label, got {target_name!r}, which stands nowhere")


@lru_cache(maxsize=256)
def parse(text: str) -> syntax.Module:
    """Parses a PTX text into a module.  A kernel is parsed only when a caller asks for it.

    Raises `PtxError` if the text is not PTX, or if its target is not Hopper."""
    ptx_code = strip_comments(text)
    version_match = re.search(r"^\s*\.version\s+([\d.]+)", ptx_code, re.MULTILINE)
    target_match = re.search(r"^\s*\.target\s+(\w+)", ptx_code, re.MULTILINE)
    if version_match is None or target_match is None:
        raise syntax.PtxError(f"PTX: expected a text with .version and .target, got {text[:60]!r}")
    if target_match[1] not in TARGETS:
        raise syntax.PtxError(f"PTX: expected the target {' or '.join(TARGETS)}, got {target_match[1]}")
    outer_sections, functions = split_module(ptx_code)
    outer_variables: dict[str, syntax.Variable] = {}
    for outer_section in outer_sections:
        for kind, statement in statements(outer_section):
            if kind == "text" and (outer_variable := declared_variable(statement)) is not None:
                outer_variables[outer_variable.name] = outer_variable
    file_names = {int(file_number): name for file_number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx_code)}
    callable_functions = {function.name: function for function in functions if not function.is_entry}
    module = syntax.Module(version_match[1])
    for function in functions:
        if function.is_entry:
            module.entries[function.name] = partial(_kernel, function, outer_variables, callable_functions, file_names)
    return module


def _kernel(
    function: Function, outer: dict[str, syntax.Variable], functions: dict[str, Function], files: dict[int, str]
) -> syntax.PtxKernel:
    parameters = declared_parameters(function.parameters)
    kernel_body = Body(functions, files, outer, parameters)
    kernel_body.read(function.body)
    block, max_block = (_triple(function.directives, name) for name in ("reqntid", "maxntid"))
    return syntax.PtxKernel(
        name=function.name,
        parameters=parameters,
        registers=kernel_body.registers,
        instructions=kernel_body.instructions,
        labels=kernel_body.labels,
        tables=kernel_body.tables,
        variables=kernel_body.variables,
        block=block,
        most_threads=math.prod(max_block) if max_block else None,
        cluster=_triple(function.directives, "reqnctapercluster"),
        max_registers=_single(function.directives, "maxnreg") or _share(function.directives, block or max_block),
    )


def _triple(directives: str, name: str) -> tuple[int, int, int] | None:
    directive = re.search(rf"\.{name}\s+([\d\s,]+)", directives)
    if not directive:
        return None
    axis_sizes = [int(size_text) for size_text in split(directive[1])]
    x, y, z = (axis_sizes + [1, 1])[:3]
    return x, y, z


def _share(directives: str, block: tuple[int, int, int] | None) -> int | None:
    """Returns the most registers per thread with which `.minnctapersm` CTAs fit on one SM. Returns None without this
    directive."""
    min_ctas = _single(directives, "minnctapersm")
    if not min_ctas or block is None:
        return None
    threads_per_cta = -(-block[0] * block[1] * block[2] // 32) * 32
    return min(SM_REGISTERS // (min_ctas * threads_per_cta) // 8 * 8, MAX_THREAD_REGISTERS)


def _single(directives: str, name: str) -> int | None:
    sizes = _triple(directives, name)
    return sizes[0] if sizes else None
