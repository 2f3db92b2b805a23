"""Emits Python code for arithmetic and logic of floats and integers (PTX ISA 8.7, sections 9.7.1 to 9.7.5, 9.7.8)."""

from __future__ import annotations

from rooflab.bench.emulator.emit.generator import Generator, emits, unknown
from rooflab.bench.emulator.numbers.bitfields import lop3_function
from rooflab.bench.emulator.text.kinds import DTYPES, dtype_of
from rooflab.bench.emulator.text.syntax import Immediate, Instruction, PtxError

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_PYTHON_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_FLOAT_TYPES = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "f32x2")


def rounding_of(parts: list[str]) -> str:
    """Returns the rounding mode that an opcode names, or an empty string."""
    return next((modifier for modifier in parts if modifier in ROUNDINGS), "")


def emit_float(g: Generator, instruction: Instruction, kind: str) -> None:
    """Emits Python code for `add`, `sub`, `mul`, `fma`, `mad`, `div`, `min`, `max`, `abs`, `neg` of floats."""
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        _half(g, instruction, kind)
        return
    opcode_parts, operands, dtype = instruction.parts, instruction.operands, dtype_of(kind)
    op_name = "fma" if opcode_parts[0] == "mad" else opcode_parts[0]
    value_texts = [g.value(operand, dtype) for operand in operands[1:]]
    rounding, has_ftz, has_sat = rounding_of(opcode_parts) or "rn", "ftz" in opcode_parts, "sat" in opcode_parts
    uses_defaults = rounding == "rn" and not has_ftz and not has_sat
    if op_name in _PYTHON_OPERATORS and uses_defaults:
        g.define(operands[0], f"{value_texts[0]} {_PYTHON_OPERATORS[op_name]} {value_texts[1]}", dtype)
    elif op_name == "fma" and uses_defaults:
        g.define(operands[0], f"floats.fma_rn_{kind}({', '.join(value_texts)})", dtype)
    elif op_name == "div" and ("full" in opcode_parts or "approx" in opcode_parts):
        function_name = "div_full" if "full" in opcode_parts else "div"
        g.define(operands[0], f"approximate.{function_name}({', '.join(value_texts)}, {has_ftz})", dtype)
    elif op_name in ("min", "max"):
        _extreme(g, instruction, dtype, value_texts)
    elif op_name in ("neg", "abs"):
        g.define(operands[0], f"floats.f{op_name}({value_texts[0]}, {has_ftz})", dtype)
    else:
        call_text = f"floats.{op_name}({', '.join(value_texts)}, rounding={rounding!r}, ftz={has_ftz}, sat={has_sat})"
        g.define(operands[0], call_text, dtype)


def _extreme(g: Generator, instruction: Instruction, dtype: str, values: list[str]) -> None:
    opcode_parts = instruction.parts
    flag_by_name = {
        "ftz": "ftz" in opcode_parts,
        "nan": "NaN" in opcode_parts,
        "xorsign_abs": "xorsign" in opcode_parts,
        "absolute": "abs" in opcode_parts and "xorsign" not in opcode_parts,
    }
    modifiers = "".join(f", {name}=True" for name, value in flag_by_name.items() if value)
    call_text = f"floats.f{opcode_parts[0]}({values[0]}, {values[1]}{modifiers})"
    for value in values[2:]:
        call_text = f"floats.f{opcode_parts[0]}({call_text}, {value}{modifiers})"
    g.define(instruction.operands[0], call_text, dtype)


def _half(g: Generator, instruction: Instruction, kind: str) -> None:
    parts, operands, dtype = instruction.parts, instruction.operands, dtype_of(kind)
    half_type = kind.removesuffix("x2")
    values_text = ", ".join(g.value(operand, dtype) for operand in operands[1:])
    function_name = {"min": "fmin", "max": "fmax", "abs": "absolute", "neg": "negative"}.get(parts[0], parts[0])
    if function_name not in ("add", "sub", "mul", "fma", "fmin", "fmax", "absolute", "negative"):
        raise unknown(instruction)
    flag_by_name = {"ftz": "ftz" in parts, "sat": "sat" in parts, "relu": "relu" in parts, "nan": "NaN" in parts}
    flag_by_name["xorsign_abs"] = "xorsign" in parts
    modifiers = "".join(f", {flag_name}=True" for flag_name, flag_value in flag_by_name.items() if flag_value)
    g.define(operands[0], f"half.{function_name}({values_text}, {half_type!r}{modifiers})", dtype)


@emits("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def special_functions(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for reciprocals, roots, exponentials, logarithms and trigonometric functions."""
    opcode_parts, operands = instruction.parts, instruction.operands
    ptx_type = next(modifier for modifier in reversed(opcode_parts) if modifier in DTYPES)
    op_name, dtype, has_ftz = opcode_parts[0], dtype_of(ptx_type), "ftz" in opcode_parts
    value_text = g.value(operands[1], dtype)
    if ptx_type in ("f16", "bf16", "f16x2", "bf16x2"):
        if op_name not in ("ex2", "tanh"):
            raise unknown(instruction)
        flag_text = f", ftz={has_ftz}" if op_name == "ex2" else ""
        g.define(operands[0], f"half.{op_name}({value_text}, {ptx_type.removesuffix('x2')!r}{flag_text})", dtype)
    elif "approx" not in opcode_parts:
        call_text = f"floats.{op_name}({value_text}, rounding={rounding_of(opcode_parts) or 'rn'!r}, ftz={has_ftz})"
        g.define(operands[0], call_text, dtype)
    elif ptx_type == "f64":
        function_name = {"rcp": "rcp_ftz_f64", "rsqrt": "rsqrt_ftz_f64" if has_ftz else "rsqrt_f64"}[op_name]
        g.define(operands[0], f"approximate.{function_name}({value_text})", dtype)
    else:
        flag_text = "" if op_name == "tanh" else f", {has_ftz}"
        g.define(operands[0], f"approximate.{op_name}({value_text}{flag_text})", dtype)


@emits("copysign")
def copy_sign(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `copysign`, which copies the sign of one float to another float."""
    dtype = dtype_of(instruction.parts[-1])
    values_text = ", ".join(g.value(operand, dtype) for operand in instruction.operands[1:])
    g.define(instruction.operands[0], f"floats.copysign({values_text})", dtype)


@emits("testp")
def test_property(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `testp`, which tests a property of a float, such as being finite."""
    _, property_name, ptx_type = instruction.parts
    value_text = g.value(instruction.operands[1], dtype_of(ptx_type))
    g.define(instruction.operands[0], f"floats.testp({value_text}, {property_name!r})", "?")


def kind_of(instruction: Instruction) -> str:
    """Returns the PTX type of an instruction, which is the last type in its opcode."""
    ptx_types = [modifier for modifier in instruction.parts if modifier in DTYPES]
    if not ptx_types:
        raise PtxError(f"PTX: expected a type in {instruction.text!r}")
    return ptx_types[-1]


def _unsigned(kind: str) -> str:
    return "u" + dtype_of(kind)[1]


@emits("add", "sub", "mul", "mad", "div", "rem", "min", "max", "abs", "neg", "fma")
def arithmetic(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for arithmetic that exists for integers and for floats."""
    ptx_type = kind_of(instruction)
    if ptx_type in _FLOAT_TYPES:
        emit_float(g, instruction, ptx_type)
        return
    opcode_parts, operands = instruction.parts, instruction.operands
    name, target_operand = opcode_parts[0], operands[0]
    if "cc" in opcode_parts:
        with_carry(g, instruction)
        return
    if "x2" in ptx_type:
        _pairs(g, instruction, ptx_type)
        return
    signed_dtype, unsigned_dtype = dtype_of(ptx_type), _unsigned(ptx_type)
    if name in ("mul", "mad") and ("wide" in opcode_parts or "hi" in opcode_parts):
        _wide(g, instruction, signed_dtype)
        return
    if name in ("add", "sub") and "sat" in opcode_parts:
        a, b = (g.value(operand, signed_dtype) for operand in operands[1:3])
        g.define(target_operand, f"integers.{name}_sat_s32({a}, {b})", signed_dtype)
    elif name in ("add", "sub", "mul"):
        a, b = (g.value(operand, unsigned_dtype) for operand in operands[1:3])
        g.define(target_operand, f"{a} {_PYTHON_OPERATORS[name]} {b}", unsigned_dtype)
    elif name == "mad":
        a, b, c = (g.value(operand, unsigned_dtype) for operand in operands[1:4])
        g.define(target_operand, f"{a} * {b} + {c}", unsigned_dtype)
    elif name in ("min", "max", "div", "rem"):
        function_name = {"min": "np.minimum", "max": "np.maximum", "div": "integers.div", "rem": "integers.rem"}[name]
        a, b = (g.value(operand, signed_dtype) for operand in operands[1:3])
        call_text = f"integers.i{name}({a}, {b}, True)" if "relu" in opcode_parts else f"{function_name}({a}, {b})"
        g.define(target_operand, call_text, signed_dtype)
    else:
        function_name = {"abs": "np.abs", "neg": "np.negative"}[name]
        g.define(target_operand, f"{function_name}({g.value(operands[1], signed_dtype)})", signed_dtype)


def _wide(g: Generator, instruction: Instruction, signed: str) -> None:
    opcode_parts, operands = instruction.parts, instruction.operands
    a, b = (g.value(operand, signed) for operand in operands[1:3])
    if "hi" in opcode_parts:
        if opcode_parts[0] == "mad":
            c = g.value(operands[3], signed)
            g.define(operands[0], f"integers.mad_hi({a}, {b}, {c}, {'sat' in opcode_parts})", signed)
        else:
            g.define(operands[0], f"integers.mul_hi({a}, {b})", signed)
        return
    wide_type = signed[0] + str(2 * int(signed[1]))
    product_text = f"{a}.astype({wide_type}) * {b}.astype({wide_type})"
    if opcode_parts[0] == "mad":
        product_text += f" + {g.value(operands[3], wide_type)}"
    g.define(operands[0], product_text, wide_type)


def _pairs(g: Generator, instruction: Instruction, kind: str) -> None:
    """Emits Python code for a PTX `add`, `min` or `max` of two packed 16-bit integers."""
    name, half_type = instruction.parts[0], dtype_of(kind.removesuffix("x2"))
    function_name = {"add": "np.add", "min": "integers.imin", "max": "integers.imax"}.get(name)
    if function_name is None:
        raise unknown(instruction)
    a, b = (g.value(operand, "u4") for operand in instruction.operands[1:3])
    relu_argument = ", True" if "relu" in instruction.parts else ""
    g.define(instruction.operands[0], f"integers.pairs({function_name}, {a}, {b}, {half_type}{relu_argument})", "u4")


@emits("addc", "subc", "madc")
def with_carry(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for instructions that read a carry flag (`addc`) or write a carry flag (`.cc`)."""
    operation_name, opcode_parts, ptx_type = instruction.parts[0], instruction.parts, kind_of(instruction)
    # The operands are signed or unsigned as the type says: the upper half of a product depends on the sign.
    argument_texts = [g.value(operand, dtype_of(ptx_type)) for operand in instruction.operands[1:]]
    if operation_name[:3] == "mad":
        argument_texts.append(str("hi" in opcode_parts))
    if operation_name[3:]:
        argument_texts.append("c.carry")
    function_name = {"add": "add_carry", "sub": "sub_borrow", "mad": "mad_carry"}[operation_name[:3]]
    result_name, carry_name = g.temporary(), g.temporary()
    g.line(f"{result_name}, {carry_name} = integers.{function_name}({', '.join(argument_texts)})")
    if "cc" in opcode_parts:
        g.line(f"c.carry = choose({g.guard}, {carry_name}, c.carry)" if g.guard else f"c.carry = {carry_name}")
    g.define(instruction.operands[0], result_name, _unsigned(ptx_type))


@emits("and", "or", "xor", "not", "cnot")
def logic(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for bitwise operations on integers and on predicates."""
    dtype = dtype_of(kind_of(instruction))
    value_texts = [g.value(operand, dtype) for operand in instruction.operands[1:]]
    op_name = instruction.parts[0]
    if op_name == "not":
        g.define(instruction.operands[0], f"~{value_texts[0]}", dtype)
    elif op_name == "cnot":
        g.define(instruction.operands[0], f"({value_texts[0]} == 0).astype({dtype})", dtype)
    else:
        g.define(instruction.operands[0], f"{value_texts[0]} {_PYTHON_OPERATORS[op_name]} {value_texts[1]}", dtype)


@emits("shl", "shr")
def shifts(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `shl` and `shr`.  A shift by more than the width acts like a shift by the width."""
    dtype = dtype_of(kind_of(instruction))
    a, bit_count = instruction.operands[1:3]
    shift_name, type_bits = instruction.parts[0], 8 * int(dtype[1])
    if isinstance(bit_count, Immediate) and 0 <= bit_count.value < type_bits:
        operator = "<<" if shift_name == "shl" else ">>"
        g.define(instruction.operands[0], f"{g.value(a, dtype)} {operator} {g.constant(bit_count.value, dtype)}", dtype)
        return
    g.define(instruction.operands[0], f"integers.{shift_name}({g.value(a, dtype)}, {g.value(bit_count, 'u4')})", dtype)


@emits("shf")
def funnel_shift(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `shf`, the funnel shift."""
    values_text = ", ".join(g.value(operand, "u4") for operand in instruction.operands[1:])
    is_left_shift, has_clamp = "l" in instruction.parts, "clamp" in instruction.parts
    g.define(instruction.operands[0], f"integers.shf({values_text}, {is_left_shift}, {has_clamp})", "u4")


@emits("bfe", "bfi")
def bit_fields(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `bfe` and `bfi`, which extract and insert bit fields."""
    dtype = dtype_of(kind_of(instruction))
    *value_operands, first_bit, bit_count = instruction.operands[1:]
    if (
        instruction.parts[0] == "bfe"
        and dtype[0] == "u"
        and isinstance(first_bit, Immediate)
        and isinstance(bit_count, Immediate)
        and 0 < bit_count.value < 8 * int(dtype[1])
        and 0 <= first_bit.value < 8 * int(dtype[1])
    ):
        mask_name = g.constant((1 << bit_count.value) - 1, dtype)
        shifted_text = f"({g.value(value_operands[0], dtype)} >> {g.constant(first_bit.value, dtype)})"
        g.define(instruction.operands[0], f"{shifted_text} & {mask_name}", dtype)
        return
    argument_text = ", ".join(
        [*(g.value(item, dtype) for item in value_operands), g.value(first_bit, "u4"), g.value(bit_count, "u4")]
    )
    g.define(instruction.operands[0], f"bitfields.{instruction.parts[0]}({argument_text})", dtype)


@emits("popc", "clz", "brev", "bfind")
def bit_counts(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for instructions that count, find or reverse bits."""
    name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    flag_text = ", True" if "shiftamt" in instruction.parts else ""
    result = dtype if name == "brev" else "u4"
    g.define(instruction.operands[0], f"bitfields.{name}({g.value(instruction.operands[1], dtype)}{flag_text})", result)


@emits("fns", "bmsk", "szext")
def masks(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `fns`, `bmsk` and `szext`, which find a set bit, make a bit mask, and extend a sign."""
    op_name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    if op_name == "fns":
        mask_operand, base_operand, offset_operand = instruction.operands[1:]
        arguments = ", ".join((g.value(mask_operand, "u4"), g.value(base_operand, "u4"), g.value(offset_operand, "i4")))
        g.define(instruction.operands[0], f"bitfields.fns({arguments})", "u4")
        return
    first_operand = g.value(instruction.operands[1], dtype if op_name == "szext" else "u4")
    arguments = f"{first_operand}, {g.value(instruction.operands[2], 'u4')}, {'clamp' in instruction.parts}"
    g.define(instruction.operands[0], f"bitfields.{op_name}({arguments})", dtype if op_name == "szext" else "u4")


@emits("lop3", "prmt")
def permutations(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `lop3` (a logic function of three operands) and `prmt` (a permutation of bytes)."""
    values_text = ", ".join(g.value(input_operand, "u4") for input_operand in instruction.operands[1:4])
    if instruction.parts[0] == "lop3":
        table_operand = instruction.operands[4]
        if not isinstance(table_operand, Immediate):
            raise PtxError(f"PTX: expected a constant table in {instruction.text!r}")
        function_name = g.bind(lop3_function(table_operand.value), ("lop3", table_operand.value))
        g.define(instruction.operands[0], f"{function_name}({values_text})", "u4")
        return
    mode_name = instruction.parts[2] if len(instruction.parts) > 2 else ""
    g.define(instruction.operands[0], f"bitfields.prmt({values_text}, {mode_name!r})", "u4")


@emits("sad", "dp4a", "dp2a", "mul24", "mad24")
def dots(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for dot products (`dp4a`, `dp2a`), 24-bit multiplications (`mul24`, `mad24`) and `sad`."""
    opcode_parts, operands = instruction.parts, instruction.operands
    name, dtype = opcode_parts[0], dtype_of(kind_of(instruction))
    if name in ("dp4a", "dp2a"):
        int_types = [modifier for modifier in opcode_parts if modifier in ("u32", "s32")]
        high_argument = f", {'hi' in opcode_parts}" if name == "dp2a" else ""
        result_dtype = "i4" if "s32" in int_types else "u4"
        a, b, c = g.value(operands[1], "u4"), g.value(operands[2], "u4"), g.value(operands[3], result_dtype)
        call_text = f"integers.{name}({a}, {b}, {c}, {int_types[0] == 's32'}, {int_types[1] == 's32'}{high_argument})"
        g.define(operands[0], call_text, result_dtype)
        return
    values_text = ", ".join(g.value(input_operand, dtype) for input_operand in operands[1:])
    flag_text = f", {'hi' in opcode_parts}" if name.endswith("24") else ""
    if name == "mad24":
        flag_text += f", {'sat' in opcode_parts}"
    g.define(operands[0], f"integers.{name}({values_text}{flag_text})", dtype)
