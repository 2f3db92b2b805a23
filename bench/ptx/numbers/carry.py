"""Extended-precision integer arithmetic of PTX: add.cc, addc, sub.cc, subc, mad.cc, madc.

PTX ISA 8.7, section "Extended-Precision Integer Arithmetic Instructions".  Operands are taken as unsigned 32- or 64-bit
integers, which signed ones do not differ from here; a carry is bool_, and after a subtraction it is the borrow.  Each
function gives the result, unsigned, and the carry out.
"""

from __future__ import annotations

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value, unsigned
from rooflab.bench.ptx.numbers.integers import mul_hi

_NONE = np.bool_(False)


def add_carry(a: Value, b: Value, carry: Value = _NONE) -> tuple[Value, Value]:
    """a + b + carry: `add.cc`, or `addc.cc` with a carry."""
    a, b = unsigned(a), unsigned(b)
    total = a + b
    result = total + carry
    return result, (total < a) | (result < total)


def sub_borrow(a: Value, b: Value, borrow: Value = _NONE) -> tuple[Value, Value]:
    """a - b - borrow: `sub.cc`, or `subc.cc` with a borrow."""
    a, b = unsigned(a), unsigned(b)
    rest = a - b
    return rest - borrow, (a < b) | ((rest == 0) & borrow)


def mad_carry(a: Value, b: Value, c: Value, high: bool, carry: Value = _NONE) -> tuple[Value, Value]:
    """The lower or the `high` half of a * b, plus c and carry: `mad.cc`, or `madc.cc` with a carry.

    The upper half depends on the sign, so a and b keep their type for it.
    """
    product = mul_hi(a, b) if high else unsigned(a) * unsigned(b)
    return add_carry(product, c, carry)
