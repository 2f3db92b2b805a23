"""mma.sync: D = A B + C of one warp, for all warps at once (PTX ISA 8.7, "Multiply-and-Accumulate Instruction: mma").

Products are exact in float32 (24 bits hold those of two f16, bf16, tf32, e4m3 or e5m2); they are summed in float32 in
the order that the matrix product of NumPy takes, which the ISA leaves open, and C is added last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value
from rooflab.bench.ptx.tiles.fragments import BYTES, a_matrix, b_matrix, lanes_of, spread, spread_pairs, stacked

_SHAPE = re.compile(r"m(8|16)n8k(\d+)")
_HALVES, _BYTES, _INTEGERS = ("f16", "bf16"), ("e4m3", "e5m2"), ("s8", "u8")
_PARTNERS = {
    **{name: (name,) for name in (*_HALVES, "tf32", "f64")},
    **dict.fromkeys(_BYTES, _BYTES),
    **dict.fromkeys(_INTEGERS, _INTEGERS),
}
_RESULTS = {
    **dict.fromkeys(("f16", *_BYTES), ("f32", "f16")),
    **dict.fromkeys(("bf16", "tf32"), ("f32",)),
    **dict.fromkeys(_INTEGERS, ("s32",)),
    "f64": ("f64",),
}
_DEPTHS = {
    **dict.fromkeys(_HALVES, (8, 16)),
    **dict.fromkeys((*_BYTES, *_INTEGERS), (16, 32)),
    "tf32": (4, 8),
    "f64": (4, 8, 16),
}


def mma(
    shape: str,
    a_type: str,
    b_type: str,
    d_type: str,
    a: Sequence[Value],
    b: Sequence[Value],
    c: Sequence[Value],
    *,
    saturate: bool = False,
    lanes: int = 0,
) -> list[np.ndarray]:
    """The registers of D, each (lanes,), from those of A, B and C, each (lanes,) or one value for all lanes.

    `shape` is m16n8k4 to m16n8k32 or m8n8k4 (f64) and m8n8k16 (s8, u8); types are named as in PTX.  A and B are
    uint32, but float64 for f64; C and D are float32, uint32 (s32, packed f16) or float64.  s32 wraps around, or with
    `saturate` (.satfinite) stops at its limits.  `lanes` matters only where no register is an array.  Raises
    `ValueError` on a combination that PTX does not have, or on a wrong number of registers.
    """
    m, counts = _plan(shape, a_type, b_type, d_type)
    if (len(a), len(b), len(c)) != counts:
        raise ValueError(f"{shape} {a_type}: expected {counts} registers of A, B, C, got {len(a), len(b), len(c)}")
    lanes = lanes_of(a, b, c) or lanes
    product = np.matmul(a_matrix(a, lanes, a_type, m), b_matrix(b, lanes, b_type).transpose(0, 2, 1))
    if d_type == "f16":
        old = stacked(c, lanes, np.uint32).view(np.float16).reshape(m // 8, lanes, 2)
        packed = (spread_pairs(product) + old).astype(np.float16).view(np.uint32)
        return list(packed.reshape(m // 8, lanes))
    found = spread(product)
    if d_type == "s32":
        return list(integer_sum(found, stacked(c, lanes, np.int32), saturate).view(np.uint32))
    found += stacked(c, lanes, found.dtype.type)
    return list(found)


def combines(a_type: str, b_type: str, d_type: str) -> bool:
    """Whether PTX multiplies these types into that one; wgmma has the same combinations, but not f64."""
    return b_type in _PARTNERS.get(a_type, ()) and d_type in _RESULTS[a_type]


def integer_sum(product: np.ndarray, old: np.ndarray, saturate: bool) -> np.ndarray:
    """`product` (whole numbers in float32) plus `old` (int32), in int32: wrapping, or stopped at the limits."""
    if not saturate:
        wrapped: np.ndarray = product.astype(np.int32) + old
        return wrapped
    limits = np.iinfo(np.int32)
    stopped: np.ndarray = np.clip(product.astype(np.int64) + old, limits.min, limits.max).astype(np.int32)
    return stopped


@cache
def _plan(shape: str, a_type: str, b_type: str, d_type: str) -> tuple[int, tuple[int, int, int]]:
    """Rows of A, and the registers of A, B and C."""
    parts = _SHAPE.fullmatch(shape)
    if not parts or not combines(a_type, b_type, d_type):
        raise ValueError(f"mma: no {shape} of {a_type} and {b_type} into {d_type}")
    m, k = int(parts[1]), int(parts[2])
    narrow = (a_type == "f64" and k == 4) or (a_type in _INTEGERS and k == 16)
    if k not in _DEPTHS[a_type] or (m == 8 and not narrow):
        raise ValueError(f"mma: no {shape} of {a_type}")
    a_registers = m * k * BYTES[a_type] // (32 * max(4, BYTES[a_type]))
    b_registers = 8 * k * BYTES[b_type] // (32 * max(4, BYTES[b_type]))
    return m, (a_registers, b_registers, m // (8 if d_type == "f16" else 4))
