"""Emits Python code for arithmetic and logic of floats and integers (PTX ISA 8.7, sections 9.7.1 to 9.7.5, 9.7.8)."""

from __future__ import annotations

from rooflab.bench.emulator.emit.generator import Generator, emits, unknown
from rooflab.bench.emulator.numbers.bitfields import lop3_function
from rooflab.bench.emulator.text.kinds import DTYPES, dtype_of
from rooflab.bench.emulator.text.syntax import Immediate, Instruction, PtxError

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "f32x2")


def rounding_of(parts: list[str]) -> str:
    """Returns the rounding mode that an opcode names, or an empty string."""
    return next((modifier for modifier in parts if modifier in ROUNDINGS), "")


def emit_float(g: Generator, instruction: Instruction, kind: str) -> None:
    """Emits the Python code of `add`, `sub`, `mul`, `fma`, `mad`, `div`, `min`, `max`, `abs`, `neg` of floats."""
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        _half(g, instruction, kind)
        return
    parts, operands, dtype = instruction.parts, instruction.operands, dtype_of(kind)
    name = "fma" if parts[0] == "mad" else parts[0]
    values = [g.value(item, dtype) for item in operands[1:]]
    rounding, ftz, sat = rounding_of(parts) or "rn", "ftz" in parts, "sat" in parts
    is_default = rounding == "rn" and not ftz and not sat
    if name in _SIGNS and is_default:
        g.define(operands[0], f"{values[0]} {_SIGNS[name]} {values[1]}", dtype)
    elif name == "fma" and is_default:
        g.define(operands[0], f"floats.fma_rn_{kind}({', '.join(values)})", dtype)
    elif name == "div" and ("full" in parts or "approx" in parts):
        function = "div_full" if "full" in parts else "div"
        g.define(operands[0], f"approximate.{function}({', '.join(values)}, {ftz})", dtype)
    elif name in ("min", "max"):
        _extreme(g, instruction, dtype, values)
    elif name in ("neg", "abs"):
        g.define(operands[0], f"floats.f{name}({values[0]}, {ftz})", dtype)
    else:
        call = f"floats.{name}({', '.join(values)}, rounding={rounding!r}, ftz={ftz}, sat={sat})"
        g.define(operands[0], call, dtype)


def _extreme(g: Generator, instruction: Instruction, dtype: str, values: list[str]) -> None:
    parts = instruction.parts
    options = {
        "ftz": "ftz" in parts,
        "nan": "NaN" in parts,
        "xorsign_abs": "xorsign" in parts,
        "absolute": "abs" in parts and "xorsign" not in parts,
    }
    modifiers = "".join(f", {name}=True" for name, value in options.items() if value)
    call = f"floats.f{parts[0]}({values[0]}, {values[1]}{modifiers})"
    for value in values[2:]:
        call = f"floats.f{parts[0]}({call}, {value}{modifiers})"
    g.define(instruction.operands[0], call, dtype)


def _half(g: Generator, instruction: Instruction, kind: str) -> None:
    parts, operands, dtype = instruction.parts, instruction.operands, dtype_of(kind)
    base = kind.removesuffix("x2")
    values = ", ".join(g.value(item, dtype) for item in operands[1:])
    name = {"min": "fmin", "max": "fmax", "abs": "absolute", "neg": "negative"}.get(parts[0], parts[0])
    if name not in ("add", "sub", "mul", "fma", "fmin", "fmax", "absolute", "negative"):
        raise unknown(instruction)
    flags = {"ftz": "ftz" in parts, "sat": "sat" in parts, "relu": "relu" in parts, "nan": "NaN" in parts}
    flags["xorsign_abs"] = "xorsign" in parts
    modifiers = "".join(f", {key}=True" for key, value in flags.items() if value)
    g.define(operands[0], f"half.{name}({values}, {base!r}{modifiers})", dtype)


@emits("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def special_functions(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of reciprocals, roots, exponentials, logarithms and trigonometric functions."""
    parts, operands = instruction.parts, instruction.operands
    kind = next(modifier for modifier in reversed(parts) if modifier in DTYPES)
    name, dtype, ftz = parts[0], dtype_of(kind), "ftz" in parts
    value = g.value(operands[1], dtype)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        if name not in ("ex2", "tanh"):
            raise unknown(instruction)
        extra = f", ftz={ftz}" if name == "ex2" else ""
        g.define(operands[0], f"half.{name}({value}, {kind.removesuffix('x2')!r}{extra})", dtype)
    elif "approx" not in parts:
        call = f"floats.{name}({value}, rounding={rounding_of(parts) or 'rn'!r}, ftz={ftz})"
        g.define(operands[0], call, dtype)
    elif kind == "f64":
        function = {"rcp": "rcp_ftz_f64", "rsqrt": "rsqrt_ftz_f64" if ftz else "rsqrt_f64"}[name]
        g.define(operands[0], f"approximate.{function}({value})", dtype)
    else:
        extra = "" if name == "tanh" else f", {ftz}"
        g.define(operands[0], f"approximate.{name}({value}{extra})", dtype)


@emits("copysign")
def copy_sign(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of `copysign`, which copies the sign of a float."""
    dtype = dtype_of(instruction.parts[-1])
    values = ", ".join(g.value(item, dtype) for item in instruction.operands[1:])
    g.define(instruction.operands[0], f"floats.copysign({values})", dtype)


@emits("testp")
def test_property(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of `testp`, which tests a property of a float."""
    _, name, kind = instruction.parts
    value = g.value(instruction.operands[1], dtype_of(kind))
    g.define(instruction.operands[0], f"floats.testp({value}, {name!r})", "?")


def kind_of(instruction: Instruction) -> str:
    """Returns the type of an instruction: the last type in its opcode."""
    kinds = [modifier for modifier in instruction.parts if modifier in DTYPES]
    if not kinds:
        raise PtxError(f"PTX: expected a type in {instruction.text!r}")
    return kinds[-1]


def _unsigned(kind: str) -> str:
    return "u" + dtype_of(kind)[1]


@emits("add", "sub", "mul", "mad", "div", "rem", "min", "max", "abs", "neg", "fma")
def arithmetic(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of the operations that exist for integers and for floats."""
    kind = kind_of(instruction)
    if kind in _FLOATS:
        emit_float(g, instruction, kind)
        return
    parts, operands = instruction.parts, instruction.operands
    name, target = parts[0], operands[0]
    if "cc" in parts:
        with_carry(g, instruction)
        return
    if "x2" in kind:
        _pairs(g, instruction, kind)
        return
    signed, unsigned = dtype_of(kind), _unsigned(kind)
    if name in ("mul", "mad") and ("wide" in parts or "hi" in parts):
        _wide(g, instruction, signed)
        return
    if name in ("add", "sub") and "sat" in parts:
        a, b = (g.value(item, signed) for item in operands[1:3])
        g.define(target, f"integers.{name}_sat_s32({a}, {b})", signed)
    elif name in ("add", "sub", "mul"):
        a, b = (g.value(item, unsigned) for item in operands[1:3])
        g.define(target, f"{a} {_SIGNS[name]} {b}", unsigned)
    elif name == "mad":
        a, b, c = (g.value(item, unsigned) for item in operands[1:4])
        g.define(target, f"{a} * {b} + {c}", unsigned)
    elif name in ("min", "max", "div", "rem"):
        function = {"min": "np.minimum", "max": "np.maximum", "div": "integers.div", "rem": "integers.rem"}[name]
        a, b = (g.value(item, signed) for item in operands[1:3])
        call = f"integers.i{name}({a}, {b}, True)" if "relu" in parts else f"{function}({a}, {b})"
        g.define(target, call, signed)
    else:
        function = {"abs": "np.abs", "neg": "np.negative"}[name]
        g.define(target, f"{function}({g.value(operands[1], signed)})", signed)


def _wide(g: Generator, instruction: Instruction, signed: str) -> None:
    parts, operands = instruction.parts, instruction.operands
    a, b = (g.value(item, signed) for item in operands[1:3])
    if "hi" in parts:
        if parts[0] == "mad":
            c = g.value(operands[3], signed)
            g.define(operands[0], f"integers.mad_hi({a}, {b}, {c}, {'sat' in parts})", signed)
        else:
            g.define(operands[0], f"integers.mul_hi({a}, {b})", signed)
        return
    wide_type = signed[0] + str(2 * int(signed[1]))
    product = f"{a}.astype({wide_type}) * {b}.astype({wide_type})"
    if parts[0] == "mad":
        product += f" + {g.value(operands[3], wide_type)}"
    g.define(operands[0], product, wide_type)


def _pairs(g: Generator, instruction: Instruction, kind: str) -> None:
    """Emits the Python code of `add`, `min` and `max` of two 16-bit integers in one register."""
    name, half_type = instruction.parts[0], dtype_of(kind.removesuffix("x2"))
    function = {"add": "np.add", "min": "integers.imin", "max": "integers.imax"}.get(name)
    if function is None:
        raise unknown(instruction)
    a, b = (g.value(item, "u4") for item in instruction.operands[1:3])
    relu = ", True" if "relu" in instruction.parts else ""
    g.define(instruction.operands[0], f"integers.pairs({function}, {a}, {b}, {half_type}{relu})", "u4")


@emits("addc", "subc", "madc")
def with_carry(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of operations that read a carry flag (`addc`) or write a carry flag (`.cc`)."""
    name, parts, kind = instruction.parts[0], instruction.parts, kind_of(instruction)
    # The operands are signed or unsigned as the type says: the upper half of a product depends on the sign.
    arguments = [g.value(item, dtype_of(kind)) for item in instruction.operands[1:]]
    if name[:3] == "mad":
        arguments.append(str("hi" in parts))
    if name[3:]:
        arguments.append("c.carry")
    function = {"add": "add_carry", "sub": "sub_borrow", "mad": "mad_carry"}[name[:3]]
    result, carry = g.temporary(), g.temporary()
    g.line(f"{result}, {carry} = integers.{function}({', '.join(arguments)})")
    if "cc" in parts:
        g.line(f"c.carry = choose({g.guard}, {carry}, c.carry)" if g.guard else f"c.carry = {carry}")
    g.define(instruction.operands[0], result, _unsigned(kind))


@emits("and", "or", "xor", "not", "cnot")
def logic(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of bitwise operations, including those on predicates."""
    dtype = dtype_of(kind_of(instruction))
    values = [g.value(item, dtype) for item in instruction.operands[1:]]
    name = instruction.parts[0]
    if name == "not":
        g.define(instruction.operands[0], f"~{values[0]}", dtype)
    elif name == "cnot":
        g.define(instruction.operands[0], f"({values[0]} == 0).astype({dtype})", dtype)
    else:
        g.define(instruction.operands[0], f"{values[0]} {_SIGNS[name]} {values[1]}", dtype)


@emits("shl", "shr")
def shifts(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of `shl` and `shr`.  A shift by more than the width acts like a shift by the width."""
    dtype = dtype_of(kind_of(instruction))
    a, count = instruction.operands[1:3]
    name, bits = instruction.parts[0], 8 * int(dtype[1])
    if isinstance(count, Immediate) and 0 <= count.value < bits:
        sign = "<<" if name == "shl" else ">>"
        g.define(instruction.operands[0], f"{g.value(a, dtype)} {sign} {g.constant(count.value, dtype)}", dtype)
        return
    g.define(instruction.operands[0], f"integers.{name}({g.value(a, dtype)}, {g.value(count, 'u4')})", dtype)


@emits("shf")
def funnel_shift(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of the funnel shift `shf`."""
    values = ", ".join(g.value(item, "u4") for item in instruction.operands[1:])
    shifts_left, clamp = "l" in instruction.parts, "clamp" in instruction.parts
    g.define(instruction.operands[0], f"integers.shf({values}, {shifts_left}, {clamp})", "u4")


@emits("bfe", "bfi")
def bit_fields(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of `bfe` and `bfi`."""
    dtype = dtype_of(kind_of(instruction))
    *values, start, count = instruction.operands[1:]
    if (
        instruction.parts[0] == "bfe"
        and dtype[0] == "u"
        and isinstance(start, Immediate)
        and isinstance(count, Immediate)
        and 0 < count.value < 8 * int(dtype[1])
        and 0 <= start.value < 8 * int(dtype[1])
    ):
        mask = g.constant((1 << count.value) - 1, dtype)
        shifted = f"({g.value(values[0], dtype)} >> {g.constant(start.value, dtype)})"
        g.define(instruction.operands[0], f"{shifted} & {mask}", dtype)
        return
    arguments = ", ".join([*(g.value(item, dtype) for item in values), g.value(start, "u4"), g.value(count, "u4")])
    g.define(instruction.operands[0], f"bitfields.{instruction.parts[0]}({arguments})", dtype)


@emits("popc", "clz", "brev", "bfind")
def bit_counts(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of instructions that count, find or reverse bits."""
    name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    extra = ", True" if "shiftamt" in instruction.parts else ""
    result = dtype if name == "brev" else "u4"
    g.define(instruction.operands[0], f"bitfields.{name}({g.value(instruction.operands[1], dtype)}{extra})", result)


@emits("fns", "bmsk", "szext")
def masks(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of the bit mask instructions `fns`, `bmsk` and `szext`."""
    name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    if name == "fns":
        mask, base, offset = instruction.operands[1:]
        arguments = ", ".join((g.value(mask, "u4"), g.value(base, "u4"), g.value(offset, "i4")))
        g.define(instruction.operands[0], f"bitfields.fns({arguments})", "u4")
        return
    first = g.value(instruction.operands[1], dtype if name == "szext" else "u4")
    arguments = f"{first}, {g.value(instruction.operands[2], 'u4')}, {'clamp' in instruction.parts}"
    g.define(instruction.operands[0], f"bitfields.{name}({arguments})", dtype if name == "szext" else "u4")


@emits("lop3", "prmt")
def permutations(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of `lop3` (logic) and `prmt` (byte permutation)."""
    values = ", ".join(g.value(item, "u4") for item in instruction.operands[1:4])
    if instruction.parts[0] == "lop3":
        table = instruction.operands[4]
        if not isinstance(table, Immediate):
            raise PtxError(f"PTX: expected a constant table in {instruction.text!r}")
        function = g.bind(lop3_function(table.value), ("lop3", table.value))
        g.define(instruction.operands[0], f"{function}({values})", "u4")
        return
    mode = instruction.parts[2] if len(instruction.parts) > 2 else ""
    g.define(instruction.operands[0], f"bitfields.prmt({values}, {mode!r})", "u4")


@emits("sad", "dp4a", "dp2a", "mul24", "mad24")
def dots(g: Generator, instruction: Instruction) -> None:
    """Emits the Python code of dot products (`dp4a`, `dp2a`), 24-bit products (`mul24`, `mad24`) and `sad`."""
    parts, operands = instruction.parts, instruction.operands
    name, dtype = parts[0], dtype_of(kind_of(instruction))
    if name in ("dp4a", "dp2a"):
        signs = [modifier for modifier in parts if modifier in ("u32", "s32")]
        high = f", {'hi' in parts}" if name == "dp2a" else ""
        result = "i4" if "s32" in signs else "u4"
        a, b, c = g.value(operands[1], "u4"), g.value(operands[2], "u4"), g.value(operands[3], result)
        call = f"integers.{name}({a}, {b}, {c}, {signs[0] == 's32'}, {signs[1] == 's32'}{high})"
        g.define(operands[0], call, result)
        return
    values = ", ".join(g.value(item, dtype) for item in operands[1:])
    extra = f", {'hi' in parts}" if name.endswith("24") else ""
    if name == "mad24":
        extra += f", {'sat' in parts}"
    g.define(operands[0], f"integers.{name}({values}{extra})", dtype)
