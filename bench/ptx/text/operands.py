"""Reads the operands of an instruction."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from rooflab.bench.ptx.text.syntax import (
    Address,
    Group,
    Immediate,
    Negated,
    Operand,
    PtxError,
    Register,
    Sink,
    Special,
    Symbol,
)

Resolve = Callable[[str], Operand]
"""What a name stands for in the scope at hand."""
_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$")
_DISPLACED = re.compile(r"([A-Za-z_$%][\w$]*)\s*([+-]\s*\w+)$")


def split(text: str) -> list[str]:
    """The operands of a list, at the commas outside all brackets."""
    found, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        if sign in "{[(":
            depth += 1
        elif sign in "}])":
            depth -= 1
        elif sign == "," and not depth:
            found.append(text[start:place].strip())
            start = place + 1
    found.append(text[start:].strip())
    return [item for item in found if item]


def number(text: str) -> int:
    """An integer constant.  Raises `PtxError` on anything else."""
    if not _NUMBER.match(text):
        raise PtxError(f"PTX: expected an integer constant, got {text!r}")
    digits = text.rstrip("U")
    # A leading zero means octal in PTX, as in C.
    if re.match(r"[-+]?0\d", digits):
        return int(digits, 8)
    return int(digits, 0)


def parse(text: str, resolve: Resolve) -> Operand:
    """An operand; names mean what `resolve` says.  Raises `PtxError` on what is none."""
    if text.startswith("["):
        return _address(text[1:-1].strip(), resolve)
    if text.startswith(("{", "(")):
        return Group(tuple(parse(item, resolve) for item in split(text[1:-1])))
    if "|" in text:
        return Group(tuple(parse(item.strip(), resolve) for item in text.split("|")))
    if text == "_":
        return Sink()
    if text.startswith("!"):
        register = resolve(text[1:].strip())
        if not isinstance(register, Register):
            raise PtxError(f"PTX: expected a predicate after '!', got {text!r}")
        return Negated(register)
    if displaced := _DISPLACED.match(text):
        symbol = resolve(displaced[1])
        if not isinstance(symbol, Symbol):
            raise PtxError(f"PTX: expected a variable's address, got {text!r}")
        return symbol._replace(offset=number(displaced[2].replace(" ", "")))
    return _constant(text) or resolve(text)


def _constant(text: str) -> Immediate | None:
    if _NUMBER.match(text):
        return Immediate(number(text))
    if found := _FLOAT.match(text):
        return Immediate(int(found[2], 16), 32 if found[1] in "fF" else 64)
    if _DECIMAL.match(text):
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None


def _address(text: str, resolve: Resolve) -> Address:
    parts = split(text)
    coordinates: tuple[Operand, ...] = ()
    for part in parts[1:]:
        found = parse(part, resolve)
        coordinates += found.items if isinstance(found, Group) else (found,)
    base, offset = parts[0], 0
    if sum_ := re.match(r"(.+?)\s*([+-])\s*(-?\w+)$", base):
        base, offset = sum_[1], number(sum_[3]) * (-1 if sum_[2] == "-" else 1)
    operand = _constant(base) or resolve(base)
    if not isinstance(operand, Register | Symbol | Immediate):
        raise PtxError(f"PTX: expected an address in [], got [{text}]")
    return Address(operand, offset, coordinates)


SPECIALS = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(?:\.[xyz])?|laneid|warpid|nwarpid"
    r"|smid|nsmid|gridid|is_explicit_cluster|cluster_ctarank|cluster_nctarank|lanemask_(?:eq|le|lt|ge|gt)|clock(?:_hi|64)?"
    r"|globaltimer(?:_lo|_hi)?|dynamic_smem_size|total_smem_size|aggr_smem_size|envreg\d+|pm\d+)$"
)


def special(text: str) -> Special | None:
    """The special register of this name, if it is one."""
    return Special(text[1:]) if SPECIALS.match(text) else None
