"""Generates a Python function for each basic block of PTX.  Each instruction becomes one or two lines of NumPy code.

The function gets a context (the lanes that run the block) and the lanes' registers.  A value that only this block uses
stays a Python local.  A value is a vector with one element per lane, or one NumPy scalar for all lanes.  The code works
for both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rooflab.bench.emulator.text import syntax
from rooflab.bench.emulator.text.flow import BasicBlock, Flow
from rooflab.bench.emulator.text.kinds import storage
from rooflab.bench.emulator.text.program import BlockFunction
from rooflab.bench.emulator.text.wgmma_registers import accumulators

_MODIFIERS = frozenset(
    # types
    "pred b1 b8 u8 s8 b16 u16 s16 f16 bf16 f16x2 bf16x2 u16x2 s16x2 b32 u32 s32 f32 tf32 b64 u64 s64 f64 b128 b1024"
    " e4m3 e5m2 e4m3x2 e5m2x2 u2 s2 u4 s4"
    # roundings, and the treatment of values that do not fit
    " rn rz rm rp rna rni rzi rmi rpi ftz noftz sat satfinite relu approx full NaN xorsign abs"
    # parts of products and carries
    " lo hi wide cc"
    # comparisons and logic
    " eq ne lt le gt ge ls hs equ neu ltu leu gtu geu num nan and or xor popc finite infinite number notanumber"
    " normal subnormal"
    # shifts and permutations
    " l r wrap clamp f4e b4e rc8 ecl ecr rc16 shiftamt idx up down bfly any all uni ballot"
    # spaces and addresses
    " global shared local param const entry func to"
    # orders and scopes
    " volatile relaxed acquire release acq_rel sc weak mmio cta cluster gpu gl sys"
    # caches
    " ca cg cs cv lu wb wt nc cache_hint no_allocate evict_first evict_last evict_normal evict_unchanged L1 L2 level"
    " fractional"
    # atomics
    " add min max inc dec exch cas"
    # barriers
    " sync aligned arrive red warp wait init inval arrive_drop expect_tx complete_tx try_wait test_wait parity"
    " noComplete mbarrier mbarrier_init noinc"
    # copies and fences
    " async bulk tensor commit_group wait_group wait_all read bulk_group bytes multicast tile prefetch reduce proxy"
    " alias tensormap generic cp_fenceproxy replace launch_dependents mask"
    " global_address rank box_dim global_dim global_stride element_stride elemtype interleave_layout swizzle_mode"
    " fill_mode"
    # matrices
    " mma_async fence row col trans"
    # conversions
    " pack"
    # driver's calls
    " vprintf __assertfail __cuda_assertfail".split()
)
_MODIFIER_PATTERN = re.compile(r"m\d+n\d+(?:k\d+)?|[1-5]d|x[124]|v[248]|(?:L2::)?(?:64|128|256)B")
Emitter = Callable[["Generator", syntax.Instruction], None]
EMITTERS: dict[str, Emitter] = {}
"""For each family of instructions, the function that emits the Python code."""


def _unknown_modifier(parts: list[str]) -> str | None:
    """Returns the first modifier of a PTX opcode that the emulator does not know, or None. `parts` is the opcode, split
    at its dots."""
    for opcode_part in parts[1:]:
        for modifier_word in opcode_part.split("::"):
            if modifier_word not in _MODIFIERS and not _MODIFIER_PATTERN.fullmatch(modifier_word):
                return opcode_part
    return None


def unknown(instruction: syntax.Instruction) -> syntax.PtxError:
    """Returns the error to raise on an unknown instruction."""
    return syntax.PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")


def address_of(operand: syntax.Operand, instruction: syntax.Instruction) -> syntax.Address:
    """Returns the operand, which must be an address.  Raises `PtxError` if the operand is not an address."""
    if not isinstance(operand, syntax.Address):
        raise syntax.PtxError(f"PTX: expected an address in {instruction.text!r}")
    return operand


def emits(*families: str) -> Callable[[Emitter], Emitter]:
    """Returns a decorator.  It registers a function that emits Python code for the instructions `families`."""

    def register(emitter: Emitter) -> Emitter:
        for family_name in families:
            if family_name in EMITTERS:
                raise ValueError(f"PTX: {family_name} is emitted twice")
            EMITTERS[family_name] = emitter
        return emitter

    return register


def _named(operand: syntax.Operand) -> str:
    return type(operand).__name__.removeprefix("Operand").lower()


class Generator:
    """Generates a Python function for each basic block of one kernel."""

    def __init__(self, flow: Flow, helpers: dict[str, Any]):
        self.flow = flow
        self.kernel = flow.kernel
        self.dtypes = storage(flow.kernel)
        """The NumPy type of each register."""
        self.namespace = dict(helpers)
        self._constants: dict[tuple[str, Any], str] = {}
        self._lines: list[str] = []
        self._locals: set[int] = set()
        """Registers that are already Python locals in the function of the current basic block."""
        self._changed: set[int] = set()
        self._views: dict[tuple[int, str], str] = {}
        self.guard: str | None = None
        """The Python expression of the current instruction's predicate, or None without a predicate."""
        self._temporaries = 0
        self._accumulators = accumulators(flow.kernel)
        self._perhaps_unwritten = self._live(0)
        self._looked_at: set[int] = set()
        """Accumulators that were already checked since the last wgmma of the current basic block."""

    # Methods that emitters call.

    def line(self, text: str) -> None:
        """Adds a line of Python to the function of the current basic block."""
        self._lines.append(text)

    def temporary(self) -> str:
        """Returns an unused variable name for the current function."""
        self._temporaries += 1
        return f"t{self._temporaries}"

    def constant(self, value: Any, dtype: str) -> str:
        """Makes a NumPy scalar of type `dtype`, and returns its name.  `value` wraps around to the type's width."""
        if dtype == "?":
            return self.bind(np.bool_(bool(value)), ("?", bool(value)))
        type_bits = 8 * int(dtype[1])
        numpy_scalar = np.array(int(value) % (1 << type_bits), f"u{dtype[1]}").view(dtype)[()]
        return self.bind(numpy_scalar, (dtype, int(value) % (1 << type_bits)))

    def bind(self, value: Any, key: tuple[str, Any]) -> str:
        """Makes `value` available to the generated functions, and returns its name there.  If `key` was used before,
        returns the earlier name."""
        if key not in self._constants:
            constant_name = f"k{len(self._constants)}"
            self._constants[key] = constant_name
            self.namespace[constant_name] = value
        return self._constants[key]

    def value(self, operand: syntax.Operand, dtype: str) -> str:
        """Returns the Python expression of an operand's value, as the NumPy type `dtype`."""
        if isinstance(operand, syntax.Register):
            return self._register(operand, dtype)
        if isinstance(operand, syntax.Immediate):
            return self.constant(_immediate(operand, dtype), dtype)
        if isinstance(operand, syntax.Negated):
            return f"~{self._register(operand.register, '?')}"
        if isinstance(operand, syntax.Special):
            return self._special(operand, dtype)
        if isinstance(operand, syntax.Symbol):
            address_text = f"c.address({operand.name!r}, {dtype!r})"
            return f"({address_text} + {self.constant(operand.offset, dtype)})" if operand.offset else address_text
        raise syntax.PtxError(f"PTX: expected a value, got a {_named(operand)}")

    def define(self, operand: syntax.Operand, expression: str, dtype: str) -> None:
        """Emits an assignment of a Python expression to a register, for the lanes with a true predicate."""
        if isinstance(operand, syntax.Sink):
            self.line(expression)
            return
        if not isinstance(operand, syntax.Register):
            raise syntax.PtxError(f"PTX: expected a register for a result, got a {_named(operand)}")
        register_dtype, register_name = self.dtypes[operand.index], f"r{operand.index}"
        if register_dtype != dtype:
            expression = self._convert(expression, dtype, register_dtype)
        if self.guard is not None:
            old_text = self._register(operand, register_dtype)
            expression = f"choose({self.guard}, {expression}, {old_text})"
        self.line(f"{register_name} = {expression}")
        self._locals.add(operand.index)
        self._changed.add(operand.index)
        for view_key in [view_key for view_key in self._views if view_key[0] == operand.index]:
            del self._views[view_key]

    def apply(
        self,
        instruction: syntax.Instruction,
        function: str,
        dtypes: str | Sequence[str],
        *more: object,
        result: str | None = None,
        **named: object,
    ) -> None:
        """Emits a call of `function`, whose result the first operand gets.  Its arguments are the other operands, then
        `more` and `named`.

        `dtypes` is the NumPy type of all arguments, or of each one.  `result` is that of the result, by default the
        first argument's."""
        target_operand, *operands = instruction.operands
        dtypes = [dtypes] * len(operands) if isinstance(dtypes, str) else dtypes
        arguments = [self.value(operand, dtype) for operand, dtype in zip(operands, dtypes, strict=True)]
        arguments += [*map(repr, more), *(f"{name}={value!r}" for name, value in named.items())]
        self.define(target_operand, f"{function}({', '.join(arguments)})", result or dtypes[0])

    def define_many(self, targets: tuple[syntax.Operand, ...], expression: str, dtypes: str | Sequence[str]) -> None:
        """Emits an assignment of the results of an expression to several registers, in order.

        `dtypes` is the NumPy type of all results, or of each one.  An expression of more results than `targets` drops
        the last ones; `dtypes` then has one for each."""
        dtypes = [dtypes] * len(targets) if isinstance(dtypes, str) else dtypes
        temporary_names = [self.temporary() for _ in dtypes]
        self.line(f"{', '.join(temporary_names)}{',' if len(temporary_names) == 1 else ''} = {expression}")
        for target_operand, temporary_name, dtype in zip(targets, temporary_names, dtypes, strict=False):
            if not isinstance(target_operand, syntax.Sink):
                self.define(target_operand, temporary_name, dtype)

    def unguarded(self, instruction: syntax.Instruction) -> None:
        """Raises `PtxError` if the instruction has a predicate.  Emitters that do not support predicates call this."""
        if self.guard is not None:
            instruction_text = syntax.quoted(instruction.text, instruction.place)
            raise syntax.PtxError(f"PTX: expected {instruction.parts[0]} without a predicate, got {instruction_text}")

    def is_local(self, name: str) -> bool:
        """Returns whether a variable is in local memory.  Parameters of function calls are there too."""
        ptx_variable = self.kernel.variables.get(name)
        return ptx_variable is not None and ptx_variable.space == "local"

    def items(self, operand: syntax.Operand) -> tuple[syntax.Operand, ...]:
        """Returns the members of an operand group, or a tuple of the operand itself if it is a single operand."""
        return operand.items if isinstance(operand, syntax.OperandGroup) else (operand,)

    # Methods that only this class calls.

    def _convert(self, expression: str, dtype: str, target: str) -> str:
        if dtype == "?" or target == "?":
            raise syntax.PtxError("PTX: expected predicates where they are wanted alone, got one beside a number")
        if dtype[1] == target[1]:
            return f"({expression}).view({target})"
        # A result narrower than its register is extended by zeros or by its sign, as its own type says (ld, cvt).  Of a
        # wider register the low bits count.
        wide_type = f"i{target[1]}" if dtype[0] == "i" else f"u{target[1]}"
        bits_text = f"({expression}).view(u{dtype[1]})" if dtype[0] == "f" else f"({expression})"
        cast_text = f"{bits_text}.astype({wide_type})"
        return cast_text if wide_type == target else f"{cast_text}.view({target})"

    def _register(self, register: syntax.Register, dtype: str) -> str:
        register_index, register_dtype = register.index, self.dtypes[register.index]
        if register_index not in self._locals:
            self.line(f"r{register_index} = R[{register_index}]")
            if register_index in self._perhaps_unwritten:
                # Poison, as in `context.merged`: a compiler may copy it, and then not select the copy.
                self.line(f"if r{register_index} is None: r{register_index} = {self.constant(-1, register_dtype)}")
            self._locals.add(register_index)
        if dtype == register_dtype:
            return f"r{register_index}"
        view_key = (register_index, dtype)
        if view_key not in self._views:
            if "?" in (dtype, register_dtype):
                raise syntax.PtxError(f"PTX: expected {register.name} to be used as what it is, a .{register.type}")
            name = self.temporary()
            self.line(f"{name} = {self._convert(f'r{register_index}', register_dtype, dtype)}")
            self._views[view_key] = name
        return self._views[view_key]

    def _special(self, operand: syntax.Special, dtype: str) -> str:
        code = f"c.special({operand.name!r})"
        source = "u8" if operand.name in ("clock64", "globaltimer") else "u4"
        return code if dtype == source or operand.name == "is_explicit_cluster" else self._convert(code, source, dtype)

    def source(self, block: BasicBlock) -> str:
        """Returns the Python source code of the function for a basic block."""
        self._lines, self._locals, self._changed, self._views = [], set(), set(), {}
        self._temporaries, self._looked_at = 0, set()
        for instruction in self.kernel.instructions[block.start : block.end]:
            self._instruction(instruction)
        live_registers = set[int]().union(*(self._live(block_start) for block_start in block.following))
        store_lines = [f"R[{index}] = r{index}" for index in sorted(self._changed & live_registers)]
        body_lines = self._lines
        if body_lines and body_lines[-1].startswith("return "):
            # The branch is the last line, so registers that the next block needs are stored before it.
            body_lines = [*body_lines[:-1], *store_lines, body_lines[-1]]
        else:
            body_lines = [*body_lines, *store_lines, f"return {block.end}"]
        return "\n".join([f"def block(c, R):  # {block.start}", *(f"    {body_line}" for body_line in body_lines)])

    def _live(self, start: int) -> frozenset[int]:
        return self.flow.live.get(start, frozenset())

    def _instruction(self, instruction: syntax.Instruction) -> None:
        op_name, location = instruction.parts[0], syntax.quoted(instruction.text, instruction.place)
        if op_name not in EMITTERS:
            raise syntax.PtxError(f"PTX: expected an instruction that is known, got {location}")
        if (unknown_modifier := _unknown_modifier(instruction.parts)) is not None:
            raise syntax.PtxError(f"PTX: expected an instruction that is known, got .{unknown_modifier} in {location}")
        try:
            self._emit(EMITTERS[op_name], instruction)
        except syntax.PtxError as error:
            raise error if instruction.text in str(error) else syntax.PtxError(f"{error} in {location}") from None
        except (ValueError, IndexError, KeyError, StopIteration) as error:
            # An emitter raises these errors when it unpacks operands or looks up modifiers.
            raise syntax.PtxError(f"PTX: expected the operands and modifiers of .{op_name}, got {location}") from error

    def _emit(self, emitter: Emitter, instruction: syntax.Instruction) -> None:
        self.guard = None
        if instruction.predicate is not None:
            predicate_text = self._register(instruction.predicate, "?")
            self.guard = f"~{predicate_text}" if instruction.negated else predicate_text
            if instruction.predicate in syntax.definitions(instruction):
                guard_text, self.guard = self.guard, self.temporary()
                self.line(f"{self.guard} = {guard_text}")
        if self._accumulators:
            self._look_at(instruction)
        emitter(self, instruction)
        self.guard = None

    def _look_at(self, instruction: syntax.Instruction) -> None:
        """Emits a check that a wgmma has finished, for each accumulator register that the instruction reads. A plain
        `mov` needs no check."""
        if instruction.opcode.startswith("wgmma"):  # `multiply_async` checks what it reads
            self._looked_at.clear()
            return
        target_operand, *source_operands = instruction.operands or (None,)
        is_guarded = instruction.predicate is not None
        registers = [operand for operand in (target_operand, *source_operands) if isinstance(operand, syntax.Register)]
        if instruction.opcode.startswith("mov") and len(registers) == 2 and not is_guarded:
            return  # both registers share one row, which the wait fills
        # Lanes whose predicate is false keep the old result, which is copied.
        result_registers = syntax.definitions(instruction) if is_guarded else ()
        for register in (*syntax.uses(instruction), *result_registers):
            if register.index in self._accumulators and register.index not in self._looked_at:
                self._looked_at.add(register.index)
                register_name = self._register(register, self.dtypes[register.index])
                self.line(f"if c.group.accumulators: matrices.check_settled(c, {register_name}, {instruction.number})")

    def function(self, block: BasicBlock) -> BlockFunction:
        """Compiles the function for a basic block and returns it."""
        source_text = self.source(block)
        compiled_code = compile(source_text, f"<PTX {self.kernel.name} {block.start}>", "exec")
        local_names: dict[str, Any] = {}
        exec(compiled_code, self.namespace, local_names)
        block_function: BlockFunction = local_names["block"]
        return block_function


def _immediate(operand: syntax.Immediate, dtype: str) -> int:
    """Returns the bits of a constant operand of type `dtype` as an integer."""
    if not operand.float_bits:
        return operand.value
    type_bits = {"4": 32, "8": 64}.get(dtype[1:])
    if type_bits is None:
        raise syntax.PtxError(
            "PTX: expected an integer where neither 32 nor 64 bits are wanted, got the constant of a float"
        )
    if operand.float_bits == type_bits:
        return operand.value
    # The constant was written as a float of the other width.
    source_float = np.array(operand.value, f"u{operand.float_bits // 8}").view(f"f{operand.float_bits // 8}")
    return int(source_float.astype(f"f{dtype[1]}").view(f"u{dtype[1]}"))
