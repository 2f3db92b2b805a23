"""Floating-point instructions (PTX ISA 8.7, sections 9.7.3 to 9.7.5)."""

from __future__ import annotations

from rooflab.bench.ptx.generate import Generator, emits
from rooflab.bench.ptx.text.kinds import DTYPES, dtype_of
from rooflab.bench.ptx.text.syntax import Instruction, PtxError

ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def rounding_of(parts: list[str]) -> str:
    """The rounding that an opcode names, or nothing."""
    return next((part for part in parts if part in ROUNDINGS), "")


def emit_float(g: Generator, instruction: Instruction, kind: str) -> None:
    """`add`, `sub`, `mul`, `fma`, `mad`, `div`, `min`, `max`, `abs`, `neg` of floats."""
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        _half(g, instruction, kind)
        return
    parts, operands, dtype = instruction.parts, instruction.operands, dtype_of(kind)
    name = "fma" if parts[0] == "mad" else parts[0]
    values = [g.value(item, dtype) for item in operands[1:]]
    rounding, ftz, sat = rounding_of(parts) or "rn", "ftz" in parts, "sat" in parts
    plain = rounding == "rn" and not ftz and not sat
    if name in _SIGNS and plain:
        g.define(operands[0], f"{values[0]} {_SIGNS[name]} {values[1]}", dtype)
    elif name == "fma" and plain:
        g.define(operands[0], f"arithmetic.fma_rn_{kind}({', '.join(values)})", dtype)
    elif name == "div" and ("full" in parts or "approx" in parts):
        function = "div_full" if "full" in parts else "div"
        g.define(operands[0], f"approximate.{function}({', '.join(values)}, {ftz})", dtype)
    elif name in ("min", "max"):
        _extreme(g, instruction, dtype, values)
    elif name == "neg" and not ftz:
        g.define(operands[0], f"-{values[0]}", dtype)
    elif name == "abs" and not ftz:
        g.define(operands[0], f"np.abs({values[0]})", dtype)
    elif name in ("neg", "abs"):
        g.define(operands[0], f"extremes.f{name}({values[0]}, True)", dtype)
    else:
        call = f"arithmetic.{name}({', '.join(values)}, rounding={rounding!r}, ftz={ftz}, sat={sat})"
        g.define(operands[0], call, dtype)


def _extreme(g: Generator, instruction: Instruction, dtype: str, values: list[str]) -> None:
    parts = instruction.parts
    options = {
        "ftz": "ftz" in parts,
        "nan": "NaN" in parts,
        "xorsign_abs": "xorsign" in parts,
        "absolute": "abs" in parts and "xorsign" not in parts,
    }
    given = "".join(f", {name}=True" for name, value in options.items() if value)
    call = f"extremes.f{parts[0]}({values[0]}, {values[1]}{given})"
    for value in values[2:]:
        call = f"extremes.f{parts[0]}({call}, {value}{given})"
    g.define(instruction.operands[0], call, dtype)


def _half(g: Generator, instruction: Instruction, kind: str) -> None:
    parts, operands, dtype = instruction.parts, instruction.operands, dtype_of(kind)
    base = kind.removesuffix("x2")
    values = ", ".join(g.value(item, dtype) for item in operands[1:])
    name = {"min": "fmin", "max": "fmax", "abs": "absolute", "neg": "negative"}.get(parts[0], parts[0])
    if name not in ("add", "sub", "mul", "fma", "fmin", "fmax", "absolute", "negative"):
        raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")
    flags = {"ftz": "ftz" in parts, "sat": "sat" in parts, "relu": "relu" in parts, "nan": "NaN" in parts}
    flags["xorsign_abs"] = "xorsign" in parts
    given = "".join(f", {key}=True" for key, value in flags.items() if value)
    g.define(operands[0], f"half.{name}({values}, {base!r}{given})", dtype)


@emits("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def special_functions(g: Generator, instruction: Instruction) -> None:
    """Reciprocals, roots, exponentials and their like."""
    parts, operands = instruction.parts, instruction.operands
    kind = next(part for part in reversed(parts) if part in DTYPES)
    name, dtype, ftz = parts[0], dtype_of(kind), "ftz" in parts
    value = g.value(operands[1], dtype)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        if name not in ("ex2", "tanh"):
            raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")
        extra = f", ftz={ftz}" if name == "ex2" else ""
        g.define(operands[0], f"half.{name}({value}, {kind.removesuffix('x2')!r}{extra})", dtype)
    elif "approx" not in parts:
        call = f"arithmetic.{name}({value}, rounding={rounding_of(parts) or 'rn'!r}, ftz={ftz})"
        g.define(operands[0], call, dtype)
    elif kind == "f64":
        function = {"rcp": "rcp_ftz_f64", "rsqrt": "rsqrt_ftz_f64" if ftz else "rsqrt_f64"}[name]
        g.define(operands[0], f"approximate.{function}({value})", dtype)
    else:
        extra = "" if name == "tanh" else f", {ftz}"
        g.define(operands[0], f"approximate.{name}({value}{extra})", dtype)


@emits("copysign")
def copy_sign(g: Generator, instruction: Instruction) -> None:
    """`copysign`."""
    dtype = dtype_of(instruction.parts[-1])
    values = ", ".join(g.value(item, dtype) for item in instruction.operands[1:])
    g.define(instruction.operands[0], f"extremes.copysign({values})", dtype)


@emits("testp")
def test_property(g: Generator, instruction: Instruction) -> None:
    """`testp`."""
    _, name, kind = instruction.parts
    g.define(
        instruction.operands[0], f"extremes.testp({g.value(instruction.operands[1], dtype_of(kind))}, {name!r})", "?"
    )
