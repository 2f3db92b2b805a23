"""Emits Python code for moves, selections, comparisons and conversions (PTX ISA 8.7, sections 9.7.6, 9.7.9)."""

from __future__ import annotations

from rooflab.bench.emulator.emit.arithmetic import ROUNDINGS, rounding_of
from rooflab.bench.emulator.emit.generator import Generator, emits, unknown
from rooflab.bench.emulator.machine.memory import LOCAL_WINDOW, PARAM_WINDOW, RANK_SHIFT, SHARED_WINDOW
from rooflab.bench.emulator.text.kinds import DTYPES, dtype_of
from rooflab.bench.emulator.text.syntax import Instruction, Operand, OperandGroup, PtxError, Register, Sink

_COMPARISONS = {
    **dict.fromkeys(("lt", "lo"), "{a} < {b}"),
    **dict.fromkeys(("le", "ls"), "{a} <= {b}"),
    **dict.fromkeys(("gt", "hi"), "{a} > {b}"),
    **dict.fromkeys(("ge", "hs"), "{a} >= {b}"),
    "eq": "{a} == {b}",
    **dict.fromkeys(("ne", "neu"), "{a} != {b}"),
    # These are also true for NaN, as neu is.
    "equ": "({a} == {b}) | ({a} != {a}) | ({b} != {b})",
    "ltu": "~({a} >= {b})",
    "leu": "~({a} > {b})",
    "gtu": "~({a} <= {b})",
    "geu": "~({a} < {b})",
    "num": "({a} == {a}) & ({b} == {b})",
    "nan": "({a} != {a}) | ({b} != {b})",
}
"""By comparison, the Python expression of its operands."""
_ORDERED_NE = "({a} < {b}) | ({a} > {b})"
"""The comparison `ne` of floats, which is false for NaN."""
_BASE_BY_SPACE = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}


@emits("mov")
def move(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `mov`, which can also pack several registers into one, or unpack one register."""
    target_operand, source_operand = instruction.operands
    dtype = dtype_of(instruction.parts[-1])
    if isinstance(target_operand, OperandGroup):
        _unpack(g, target_operand, source_operand)
    elif isinstance(source_operand, OperandGroup):
        _pack(g, target_operand, source_operand)
    elif isinstance(target_operand, Register):
        register_dtype = g.dtypes[target_operand.index]
        result_dtype = register_dtype if register_dtype == "?" or register_dtype[1] == dtype[1] else dtype
        g.define(target_operand, g.value(source_operand, result_dtype), result_dtype)


def _pack(g: Generator, target: Operand, source: OperandGroup) -> None:
    if not isinstance(target, Register):
        raise PtxError("PTX: expected a register that takes what is packed")
    target_bytes = int(g.dtypes[target.index][1])
    item_bytes = target_bytes // len(source.items)
    packed_text = ""
    for index, operand in enumerate(source.items):
        value = f"{g.value(operand, f'u{item_bytes}')}.astype(u{target_bytes})"
        packed_text += f" | ({value} << {g.constant(8 * item_bytes * index, f'u{target_bytes}')})" if index else value
    g.define(target, packed_text, f"u{target_bytes}")


def _unpack(g: Generator, target: OperandGroup, source: Operand) -> None:
    if not isinstance(source, Register):
        raise PtxError("PTX: expected a register that is taken apart")
    size = int(g.dtypes[source.index][1])
    item_bytes = size // len(target.items)
    source_name = g.temporary()
    g.line(f"{source_name} = {g.value(source, f'u{size}')}")
    for index, operand in enumerate(target.items):
        if isinstance(operand, Sink):
            continue
        shifted_text = f"({source_name} >> {g.constant(8 * item_bytes * index, f'u{size}')})" if index else source_name
        g.define(operand, f"{shifted_text}.astype(u{item_bytes})", f"u{item_bytes}")


@emits("selp")
def select(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `selp`, which selects an operand by a predicate."""
    target_operand, a, b, predicate = instruction.operands
    dtype = dtype_of(instruction.parts[-1])
    if isinstance(target_operand, Register) and g.dtypes[target_operand.index][1:] == dtype[1:]:
        dtype = g.dtypes[target_operand.index]
    values_text = f"{g.value(predicate, '?')}, {g.value(a, dtype)}, {g.value(b, dtype)}"
    g.define(target_operand, f"choose({values_text})", dtype)


@emits("slct")
def select_by_sign(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `slct`, which selects an operand by the sign of the last operand."""
    types = [modifier for modifier in instruction.parts if modifier in DTYPES]
    target_operand, a, b, sign_operand = instruction.operands
    dtype = dtype_of(types[0])
    sign_test = f"{_flushed(g.value(sign_operand, dtype_of(types[1])), types[1], 'ftz' in instruction.parts)} >= 0"
    g.define(target_operand, f"choose({sign_test}, {g.value(a, dtype)}, {g.value(b, dtype)})", dtype)


def comparison(g: Generator, name: str, kind: str, a: Operand, b: Operand, ftz: bool) -> str:
    """Returns the Python expression of the PTX comparison `name` (such as `lt`) between the operands `a` and `b`."""
    return _compared(name, kind, *(_flushed(g.value(operand, dtype_of(kind)), kind, ftz) for operand in (a, b)))


def _flushed(value: str, kind: str, ftz: bool) -> str:
    """Returns a Python expression for an operand of a comparison. With `ftz`, subnormal values become zero."""
    if not ftz:
        return value
    return f"half.flush({value}, {kind!r})" if kind in ("f16", "bf16") else f"bits.flush({value})"


def _compared(name: str, kind: str, left: str, right: str) -> str:
    is_half = kind in ("f16", "bf16")
    dtype = dtype_of(kind)
    if kind.endswith("x2"):
        raise PtxError(f"PTX: expected a comparison of single numbers, got one of .{kind}")
    if is_half:
        left, right = (f"formats.decode({value}, {kind!r})" for value in (left, right))
    if name not in _COMPARISONS:
        raise PtxError(f"PTX: expected a comparison that is known, got {name}")
    is_ordered_ne = name == "ne" and (is_half or dtype[0] == "f")
    return (_ORDERED_NE if is_ordered_ne else _COMPARISONS[name]).format(a=left, b=right)


@emits("setp")
def set_predicate(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `setp`, which may combine the result with a predicate, and write the negated result."""
    opcode_parts = [modifier for modifier in instruction.parts if modifier != "ftz"]
    name, kind, ftz = opcode_parts[1], opcode_parts[-1], "ftz" in instruction.parts
    target_operand, a, b, *extra_operands = instruction.operands
    result_name = g.temporary()
    value_texts = [result_name, f"~{result_name}"]
    if kind.endswith("x2"):
        # Each half has a predicate.
        value_texts[1] = g.temporary()
        shift_text = g.constant(16, "u4")
        for value_text, shift in zip(value_texts, ("", f" >> {shift_text}"), strict=True):
            halves = (_flushed(f"({g.value(operand, 'u4')}{shift}).astype(u2)", kind[:-2], ftz) for operand in (a, b))
            g.line(f"{value_text} = {_compared(name, kind[:-2], *halves)}")
    else:
        g.line(f"{result_name} = {comparison(g, name, kind, a, b, ftz)}")
    result_operands = target_operand.items if isinstance(target_operand, OperandGroup) else (target_operand,)
    if len(opcode_parts) == 4:
        logic_operator = {"and": "&", "or": "|", "xor": "^"}[opcode_parts[2]]
        # The register of the first result may also be the register of this operand.
        predicate_name = g.temporary()
        g.line(f"{predicate_name} = {g.value(extra_operands[0], '?')}")
        value_texts = [f"({value_text}) {logic_operator} {predicate_name}" for value_text in value_texts]
    for result_operand, value_text in zip(result_operands, value_texts, strict=False):
        if not isinstance(result_operand, Sink):
            g.define(result_operand, value_text, "?")


@emits("set")
def set_value(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `set`, which writes 1.0 (float) or all ones (integer) if the comparison is true."""
    opcode_parts = [modifier for modifier in instruction.parts if modifier != "ftz"]
    result_type, kind = opcode_parts[-2], opcode_parts[-1]
    target_operand, a, b = instruction.operands[:3]
    dtype = dtype_of(result_type)
    if "f16" in result_type:
        raise unknown(instruction)
    true_value = g.constant(0x3F800000, "u4") + ".view(f4)" if result_type == "f32" else g.constant(-1, dtype)
    false_value = g.constant(0, dtype)
    condition_text = comparison(g, opcode_parts[1], kind, a, b, "ftz" in instruction.parts)
    if len(opcode_parts) == 5:
        logic_operator = {"and": "&", "or": "|", "xor": "^"}[opcode_parts[2]]
        condition_text = f"({condition_text}) {logic_operator} {g.value(instruction.operands[3], '?')}"
    g.define(target_operand, f"choose({condition_text}, {true_value}, {false_value})", dtype)


@emits("cvt")
def convert(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for the conversion `cvt`."""
    op_parts, operands = instruction.parts, instruction.operands
    ptx_types = [part for part in op_parts if part in DTYPES]
    target, source = ptx_types[0], ptx_types[-1]
    if "pack" in op_parts:
        dtypes = ("i4", "i4", "u4")[: len(operands) - 1]
        g.apply(instruction, "formats.cvt_pack", dtypes, to=op_parts[op_parts.index("sat") + 1], result="u4")
        return
    flags = {name: True for name in ("ftz", "sat", "relu", "satfinite") if name in op_parts}
    round_mode = rounding_of(op_parts) or next((part for part in op_parts if part in ("rni", "rzi", "rmi", "rpi")), "")
    result_dtype = dtype_of(target)
    if target[0] in "us" and source[0] not in "us" and round_mode in ROUNDINGS:
        raise PtxError(f"PTX: expected cvt.rni, .rzi, .rmi or .rpi from {source} to {target}, got {instruction.text!r}")
    if target.endswith("x2"):
        _check_packed(instruction, target, source, round_mode)
    if target == "bf16x2" and source == "f32" and round_mode == "rn" and not flags:
        g.apply(instruction, "formats.cvt_rn_bf16x2_f32", "f4", result="u4")
    elif target.endswith("x2") and source == "f32":
        g.apply(instruction, "formats.cvt_pair", "f4", target, round_mode, result=result_dtype, **flags)
    elif target.endswith("x2"):
        function, kind = ("cvt_fp8x2_f16x2", target) if source == "f16x2" else ("cvt_f16x2_fp8x2", source)
        relu = "relu" in flags
        g.apply(instruction, f"formats.{function}", dtype_of(source), kind, result=result_dtype, relu=relu)
    elif target[0] in "us" and source[0] in "us" and not flags:
        g.define(operands[0], f"{g.value(operands[1], dtype_of(source))}.astype({result_dtype})", result_dtype)
    else:
        g.apply(instruction, "formats.cvt", dtype_of(source), target, source, round_mode, result=result_dtype, **flags)


def _check_packed(instruction: Instruction, to: str, source: str, rounding: str) -> None:
    """Raises `PtxError` if a conversion to two packed values (`cvt`) lacks a modifier that PTX requires."""
    if {"ftz", "sat"} & {*instruction.parts}:
        raise unknown(instruction)
    is_fp8 = to.startswith("e")
    allowed_roundings = ("rn",) if is_fp8 or source != "f32" else ("rn", "rz")
    if rounding not in allowed_roundings or (is_fp8 and "satfinite" not in instruction.parts):
        suffix = " or ".join(f".{name}" for name in allowed_roundings) + (".satfinite" if is_fp8 else "")
        raise PtxError(f"PTX: expected cvt{suffix} into a pair of {to.removesuffix('x2')}, got {instruction.text!r}")


@emits("cvta", "isspacep", "mapa", "getctarank")
def addresses(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for the address instructions `cvta`, `isspacep`, `mapa` and `getctarank`."""
    op_parts, operands = instruction.parts, instruction.operands
    name = op_parts[0]
    space_names = (modifier.split("::")[0] for modifier in op_parts[1:])
    space = next((space_name for space_name in space_names if space_name in (*_BASE_BY_SPACE, "global", "const")), "")
    address_dtype = "u8" if op_parts[-1].endswith("64") else "u4"
    if name == "cvta":
        address_text = g.value(operands[1], address_dtype)
        if space in _BASE_BY_SPACE:
            offset_mask = g.constant((1 << 60) - 1, address_dtype)
            window_base = g.constant(_BASE_BY_SPACE[space], address_dtype)
            address_text = f"{address_text} & {offset_mask}" if "to" in op_parts else f"{address_text} | {window_base}"
        g.define(operands[0], address_text, address_dtype)
    elif name == "isspacep":
        if space == "const":
            raise PtxError(f"PTX: expected a space that addresses tell apart, got {instruction.text!r}")
        window_number = g.constant(_BASE_BY_SPACE.get(space, 0) >> 60, "u8")
        g.define(operands[0], f"({g.value(operands[1], 'u8')} >> {g.constant(60, 'u8')}) == {window_number}", "?")
    elif name == "mapa":
        address_mask = (1 << RANK_SHIFT) - 1 | (SHARED_WINDOW if address_dtype == "u8" else 0)
        offset = f"{g.value(operands[1], address_dtype)} & {g.constant(address_mask, address_dtype)}"
        rank_text = f"{g.value(operands[2], 'u4')}.astype({address_dtype}) + {g.constant(1, address_dtype)}"
        g.define(operands[0], f"({offset}) | (({rank_text}) << {g.constant(RANK_SHIFT, address_dtype)})", address_dtype)
    else:
        g.define(operands[0], f"synchronising.rank_of(c, {g.value(operands[1], address_dtype)})", "u4")
