"""Integer and logic instructions (PTX ISA 8.7, sections 9.7.1, 9.7.2, 9.7.8)."""

from __future__ import annotations

from rooflab.bench.ptx.emit.floats import emit_float
from rooflab.bench.ptx.generate import Generator, emits
from rooflab.bench.ptx.numbers.permute import lop3_function
from rooflab.bench.ptx.text.kinds import DTYPES, dtype_of
from rooflab.bench.ptx.text.syntax import Immediate, Instruction, PtxError

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "f32x2")


def kind_of(instruction: Instruction) -> str:
    """The type of an instruction, the last of its opcode."""
    kinds = [part for part in instruction.parts if part in DTYPES]
    if not kinds:
        raise PtxError(f"PTX: expected a type in {instruction.text!r}")
    return kinds[-1]


def _unsigned(kind: str) -> str:
    return "u" + dtype_of(kind)[1]


@emits("add", "sub", "mul", "mad", "div", "rem", "min", "max", "abs", "neg", "fma")
def arithmetic(g: Generator, instruction: Instruction) -> None:
    """What both integers and floats have."""
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
        if "relu" in parts:
            g.define(target, f"integers.i{name}({a}, {b}, True)", signed)
        else:
            g.define(target, f"{function}({a}, {b})", signed)
    else:
        g.define(target, f"integers.i{name}({g.value(operands[1], signed)})", signed)


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
    wide = signed[0] + str(2 * int(signed[1]))
    product = f"{a}.astype({wide}) * {b}.astype({wide})"
    if parts[0] == "mad":
        product += f" + {g.value(operands[3], wide)}"
    g.define(operands[0], product, wide)


def _pairs(g: Generator, instruction: Instruction, kind: str) -> None:
    """`add`, `min` and `max` of packed 16-bit integers."""
    name, half = instruction.parts[0], dtype_of(kind.removesuffix("x2"))
    function = {"add": "np.add", "min": "integers.imin", "max": "integers.imax"}.get(name)
    if function is None:
        raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")
    a, b = (g.value(item, "u4") for item in instruction.operands[1:3])
    relu = ", True" if "relu" in instruction.parts else ""
    g.define(instruction.operands[0], f"integers.pairs({function}, {a}, {b}, {half}{relu})", "u4")


@emits("addc", "subc", "madc")
def with_carry(g: Generator, instruction: Instruction) -> None:
    """Additions that take the carry of one before (`addc`), and leave theirs (`.cc`)."""
    name, parts, kind = instruction.parts[0], instruction.parts, kind_of(instruction)
    # Signed where the type is: the upper half of a product depends on it.
    given = [g.value(item, dtype_of(kind)) for item in instruction.operands[1:]]
    if name[:3] == "mad":
        given.append(str("hi" in parts))
    if name[3:]:
        given.append("c.carry")
    function = {"add": "add_carry", "sub": "sub_borrow", "mad": "mad_carry"}[name[:3]]
    result, left = g.temporary(), g.temporary()
    g.line(f"{result}, {left} = carry.{function}({', '.join(given)})")
    if "cc" in parts:
        g.line(f"c.carry = choose({g.guard}, {left}, c.carry)" if g.guard else f"c.carry = {left}")
    g.define(instruction.operands[0], result, _unsigned(kind))


@emits("and", "or", "xor", "not", "cnot")
def logic(g: Generator, instruction: Instruction) -> None:
    """Bitwise operations, on predicates as well."""
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
    """Shifts, clamped at the width: NumPy's own do that."""
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
    """`shf.l.wrap.b32` and its like."""
    values = ", ".join(g.value(item, "u4") for item in instruction.operands[1:])
    left, clamp = "l" in instruction.parts, "clamp" in instruction.parts
    g.define(instruction.operands[0], f"integers.shf({values}, {left}, {clamp})", "u4")


@emits("bfe", "bfi")
def bit_fields(g: Generator, instruction: Instruction) -> None:
    """Bit fields taken out and put in."""
    dtype = dtype_of(kind_of(instruction))
    *values, position, length = instruction.operands[1:]
    start, count = position, length
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
    given = ", ".join([*(g.value(item, dtype) for item in values), g.value(position, "u4"), g.value(length, "u4")])
    g.define(instruction.operands[0], f"bitfields.{instruction.parts[0]}({given})", dtype)


@emits("popc", "clz", "brev", "bfind")
def bit_counts(g: Generator, instruction: Instruction) -> None:
    """Bits counted, found and reversed."""
    name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    extra = ", True" if "shiftamt" in instruction.parts else ""
    result = dtype if name == "brev" else "u4"
    g.define(instruction.operands[0], f"bitfields.{name}({g.value(instruction.operands[1], dtype)}{extra})", result)


@emits("fns", "bmsk", "szext")
def masks(g: Generator, instruction: Instruction) -> None:
    """`fns`, `bmsk`, `szext`."""
    name, dtype = instruction.parts[0], dtype_of(kind_of(instruction))
    if name == "fns":
        mask, base, offset = instruction.operands[1:]
        given = ", ".join((g.value(mask, "u4"), g.value(base, "u4"), g.value(offset, "i4")))
        g.define(instruction.operands[0], f"bitfields.fns({given})", "u4")
        return
    first = g.value(instruction.operands[1], dtype if name == "szext" else "u4")
    given = f"{first}, {g.value(instruction.operands[2], 'u4')}, {'clamp' in instruction.parts}"
    g.define(instruction.operands[0], f"bitfields.{name}({given})", dtype if name == "szext" else "u4")


@emits("lop3", "prmt")
def permutations(g: Generator, instruction: Instruction) -> None:
    """`lop3` and `prmt`."""
    if instruction.parts[0] == "lop3":
        table = instruction.operands[4]
        if not isinstance(table, Immediate):
            raise PtxError(f"PTX: expected a constant table in {instruction.text!r}")
        values = ", ".join(g.value(item, "u4") for item in instruction.operands[1:4])
        function = g.bind(lop3_function(table.value), ("lop3", table.value))
        g.define(instruction.operands[0], f"{function}({values})", "u4")
        return
    mode = instruction.parts[2] if len(instruction.parts) > 2 else ""
    values = ", ".join(g.value(item, "u4") for item in instruction.operands[1:4])
    g.define(instruction.operands[0], f"permute.prmt({values}, {mode!r})", "u4")


@emits("sad", "dp4a", "dp2a", "mul24", "mad24")
def dots(g: Generator, instruction: Instruction) -> None:
    """Sums of differences and small products."""
    parts, operands = instruction.parts, instruction.operands
    name, dtype = parts[0], dtype_of(kind_of(instruction))
    if name in ("dp4a", "dp2a"):
        signs = [part for part in parts if part in ("u32", "s32")]
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
