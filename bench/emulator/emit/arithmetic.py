"""Emits Python code for arithmetic and logic of floats and integers (PTX ISA 8.7, sections 9.7.1 to 9.7.5, 9.7.8)."""

from __future__ import annotations

from typing import Any

from rooflab.bench.emulator.emit.generator import Generator, emits, unknown
from rooflab.bench.emulator.numbers.bitfields import lop3_function
from rooflab.bench.emulator.numbers.floats import TESTS
from rooflab.bench.emulator.text.kinds import DTYPES, dtype_of
from rooflab.bench.emulator.text.syntax import Immediate, Instruction, PtxError

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_PYTHON_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
HALF_TYPES = ("f16", "f16x2", "bf16", "bf16x2")
_FLOAT_FUNCTIONS = {"mad": "fma", "min": "fmin", "max": "fmax", "abs": "fabs", "neg": "fneg"}
_INTEGER_FUNCTIONS = {"min": "np.minimum", "max": "np.maximum", "abs": "np.abs", "neg": "np.negative"}
_INTEGER_FUNCTIONS |= {"div": "integers.div", "rem": "integers.rem"}
_FLAGS = {"ftz": "ftz", "sat": "sat", "relu": "relu", "nan": "NaN", "xorsign_abs": "xorsign"}
"""By parameter of a function in `numbers`, the modifier that makes it true."""


def rounding_of(parts: list[str]) -> str:
    """Returns the rounding mode that an opcode names, or an empty string."""
    return next((modifier for modifier in parts if modifier in ROUNDINGS), "")


def _flags(instruction: Instruction) -> dict[str, Any]:
    return {name: True for name, modifier in _FLAGS.items() if modifier in instruction.parts}


def _float(g: Generator, instruction: Instruction, kind: str) -> None:
    """Emits Python code for `add`, `sub`, `mul`, `fma`, `mad`, `div`, `min`, `max`, `abs`, `neg` of floats."""
    opcode_parts, dtype, flags = instruction.parts, dtype_of(kind), _flags(instruction)
    name = _FLOAT_FUNCTIONS.get(opcode_parts[0], opcode_parts[0])
    rounding = rounding_of(opcode_parts) or "rn"
    if name == "rem" or (kind in HALF_TYPES and opcode_parts[0] in ("mad", "div")):
        raise unknown(instruction)
    if kind in HALF_TYPES:
        g.apply(instruction, f"half.{name}", dtype, kind.removesuffix("x2"), **flags)
    elif name in _PYTHON_OPERATORS and rounding == "rn" and not flags:
        a, b = (g.value(operand, dtype) for operand in instruction.operands[1:])
        g.define(instruction.operands[0], f"{a} {_PYTHON_OPERATORS[name]} {b}", dtype)
    elif name == "fma" and rounding == "rn" and not flags:
        g.apply(instruction, f"floats.fma_rn_{kind}", dtype)
    elif "approx" in opcode_parts:
        g.apply(instruction, "approximate.div", dtype, **flags)
    elif name in ("fmin", "fmax", "fabs", "fneg"):
        g.apply(instruction, f"floats.{name}", dtype, **flags)
    else:  # div.full too, of which the hardware's error is at most 2 ulp
        g.apply(instruction, f"floats.{name}", dtype, rounding=rounding, **flags)


@emits("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def special_functions(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for reciprocals, roots, exponentials, logarithms and trigonometric functions."""
    opcode_parts, ptx_type, flags = instruction.parts, kind_of(instruction), _flags(instruction)
    name, dtype = opcode_parts[0], dtype_of(ptx_type)
    if ptx_type in HALF_TYPES:
        if name not in ("ex2", "tanh"):
            raise unknown(instruction)
        g.apply(instruction, f"half.{name}", dtype, ptx_type.removesuffix("x2"), **flags)
    elif "approx" not in opcode_parts or (name in ("rcp", "sqrt") and ptx_type == "f32"):
        # The hardware's error of rcp.approx is at most 1 ulp, and that of sqrt.approx 2**-23; here both are rounded.
        g.apply(instruction, f"floats.{name}", dtype, rounding=rounding_of(opcode_parts) or "rn", **flags)
    elif ptx_type == "f64":
        name = {"rcp": "rcp_ftz_f64", "rsqrt": "rsqrt_ftz_f64" if flags else "rsqrt_f64"}[name]
        g.apply(instruction, f"approximate.{name}", dtype)
    else:
        g.apply(instruction, f"approximate.{name}", dtype, **flags)


@emits("copysign")
def copy_sign(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `copysign`, which copies the sign of one float to another float."""
    g.apply(instruction, "floats.copysign", dtype_of(instruction.parts[-1]))


@emits("testp")
def test_property(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `testp`, which tests a property of a float, such as being finite."""
    _, property_name, ptx_type = instruction.parts
    if property_name not in TESTS:
        raise unknown(instruction)
    g.apply(instruction, f"floats.TESTS[{property_name!r}]", dtype_of(ptx_type), result="?")


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
    if "f" in ptx_type:
        _float(g, instruction, ptx_type)
    elif "cc" in instruction.parts:
        with_carry(g, instruction)
    else:
        _integer(g, instruction, ptx_type)


def _integer(g: Generator, instruction: Instruction, kind: str) -> None:
    opcode_parts, (target_operand, *operands), flags = instruction.parts, instruction.operands, _flags(instruction)
    name, dtype = opcode_parts[0], dtype_of(kind)
    if kind.endswith("x2"):
        function = {"add": "np.add", "min": "np.minimum", "max": "np.maximum"}[name]
        a, b = (g.value(operand, "u4") for operand in operands)
        half_type = dtype_of(kind.removesuffix("x2"))
        g.define(target_operand, f"integers.pairs({function}, {a}, {b}, {half_type}, {'relu' in flags})", "u4")
    elif name in ("mul", "mad") and "hi" in opcode_parts:
        g.apply(instruction, f"integers.{name}_hi", dtype, **flags)
    elif name in ("add", "sub") and "sat" in flags:
        g.apply(instruction, f"integers.{name}_sat_s32", dtype)
    elif name in ("add", "sub", "mul", "mad"):
        result, cast = _unsigned(kind), ""
        if "wide" in opcode_parts:
            result = dtype[0] + str(2 * int(dtype[1]))
            cast = f".astype({result})"
        a, b = (g.value(operand, dtype if cast else result) + cast for operand in operands[:2])
        text = f"{a} {_PYTHON_OPERATORS.get(name, '*')} {b}"
        g.define(target_operand, f"{text} + {g.value(operands[2], result)}" if name == "mad" else text, result)
    elif "relu" in flags:
        a, b = (g.value(operand, dtype) for operand in operands)
        g.define(target_operand, f"np.maximum({_INTEGER_FUNCTIONS[name]}({a}, {b}), 0)", dtype)
    else:
        g.apply(instruction, _INTEGER_FUNCTIONS[name], dtype)


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
    g.apply(instruction, "integers.shf", "u4", "l" in instruction.parts, "clamp" in instruction.parts)


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
    g.apply(instruction, f"bitfields.{instruction.parts[0]}", (*[dtype] * len(value_operands), "u4", "u4"))


@emits("popc", "clz", "brev", "bfind")
def bit_counts(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for instructions that count, find or reverse bits."""
    name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    flags = {"shift_amount": True} if "shiftamt" in instruction.parts else {}
    g.apply(instruction, f"bitfields.{name}", dtype, result=dtype if name == "brev" else "u4", **flags)


@emits("fns", "bmsk", "szext")
def masks(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `fns`, `bmsk` and `szext`, which find a set bit, make a bit mask, and extend a sign."""
    name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    dtypes = {"fns": ("u4", "u4", "i4"), "bmsk": ("u4", "u4"), "szext": (dtype, "u4")}[name]
    g.apply(instruction, f"bitfields.{name}", dtypes, *(() if name == "fns" else ("clamp" in instruction.parts,)))


@emits("lop3", "prmt")
def permutations(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `lop3` (a logic function of three operands) and `prmt` (a permutation of bytes)."""
    if instruction.parts[0] == "prmt":
        g.apply(instruction, "bitfields.prmt", "u4", *instruction.parts[2:])
        return
    table_operand = instruction.operands[4]
    if not isinstance(table_operand, Immediate):
        raise PtxError(f"PTX: expected a constant table in {instruction.text!r}")
    function_name = g.bind(lop3_function(table_operand.value), ("lop3", table_operand.value))
    values_text = ", ".join(g.value(operand, "u4") for operand in instruction.operands[1:4])
    g.define(instruction.operands[0], f"{function_name}({values_text})", "u4")


@emits("sad", "dp4a", "dp2a", "mul24", "mad24")
def dots(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for dot products (`dp4a`, `dp2a`), 24-bit multiplications (`mul24`, `mad24`) and `sad`."""
    opcode_parts, high = instruction.parts, "hi" in instruction.parts
    name, dtype = opcode_parts[0], dtype_of(kind_of(instruction))
    if name in ("dp4a", "dp2a"):
        int_types = [modifier for modifier in opcode_parts if modifier in ("u32", "s32")]
        signs = [int_type == "s32" for int_type in int_types]
        result = "i4" if any(signs) else "u4"
        more = (high,) if name == "dp2a" else ()
        g.apply(instruction, f"integers.{name}", ("u4", "u4", result), *signs, *more, result=result)
    else:
        g.apply(instruction, f"integers.{name}", dtype, *(() if name == "sad" else (high,)), **_flags(instruction))
