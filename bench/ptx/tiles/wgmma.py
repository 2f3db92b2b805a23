"""wgmma: D = A B + D of a warpgroup, and how D and A lie in its registers.

PTX ISA 8.7, "Register Fragments for wgmma.mma_async.m64nNk...": a warpgroup's four warps hold 16 rows each.  A is laid
out as in mma.sync.  Of D, lane 4 * g + t of warp w holds row 16 * w + 8 * half + g, column 8 * block + 2 * t + e: in
register 4 * block + 2 * half + e, or, packed as f16, in half e of register 2 * block + half.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value
from rooflab.bench.ptx.tiles.fragments import a_matrix, lanes_of
from rooflab.bench.ptx.tiles.mma import combines, integer_sum

WARPGROUP = 128
ROWS = 64


@cache
def check_shape(n: int, d_type: str, a_type: str, b_type: str, registers: int) -> None:
    """Raises `ValueError` on an N or types that wgmma does not have, or where D has another number of registers."""
    if a_type == "f64" or not combines(a_type, b_type, d_type):
        raise ValueError(f"wgmma: no product of {a_type} and {b_type} into {d_type}")
    step = 16 if d_type == "s32" and n not in (8, 24) else 8
    if not 0 < n <= 256 or n % step:
        raise ValueError(f"wgmma: expected an N of 8 to 256 that {a_type} has, got {n}")
    wanted = n // (4 if d_type == "f16" else 2)
    if registers != wanted:
        raise ValueError(f"wgmma: expected {wanted} registers of D for {n} columns of {d_type}, got {registers}")


def wgmma(
    d: np.ndarray | None,
    a: np.ndarray,
    b: np.ndarray,
    d_type: str = "f32",
    *,
    scale_a: int = 1,
    scale_b: int = 1,
    saturate: bool = False,
) -> np.ndarray:
    """A times the transpose of `b`, plus `d` unless it is None (scale-d is false).

    `a` is (..., 64, K) and `b` (..., N, K), float32, as `read_operand` and `a_from_registers` give them.  The result is
    (..., 64, N): float32 for f32; for f16 float32 too, rounded to what f16 holds; int32 for s32, wrapping or, with
    `saturate`, stopping at its limits.  `scale_a` and `scale_b` are 1 or -1.  Products are exact and summed in float32;
    D is added last, once per instruction.  Raises `ValueError` on another type or scale.
    """
    if {scale_a, scale_b} - {1, -1}:
        raise ValueError(f"scale: expected 1 or -1, got {scale_a} and {scale_b}")
    product: np.ndarray = np.matmul(a, np.swapaxes(b, -1, -2))
    if scale_a != scale_b:
        product = -product
    if d_type == "s32":
        old = np.zeros(product.shape, np.int32) if d is None else d
        return integer_sum(product, old, saturate)
    if d is not None:
        product += d
    if d_type == "f32":
        return product
    if d_type == "f16":
        return product.astype(np.float16).astype(np.float32)
    raise ValueError(f"d_type: expected f32, f16 or s32, got {d_type}")


def a_from_registers(registers: Sequence[Value], element: str, lanes: int = 0) -> np.ndarray:
    """A of each warpgroup (warpgroups, 64, K), float32, from its four registers (128 * warpgroups,) uint32.

    `lanes` matters only where no register is an array.  Raises `ValueError` where they are not whole warpgroups, or
    not four.
    """
    lanes = lanes_of(registers) or lanes
    if len(registers) != 4 or lanes % WARPGROUP:
        raise ValueError(f"registers: expected 4 of whole warpgroups of 128 lanes, got {len(registers)} of {lanes}")
    warps = a_matrix(registers, lanes, element)
    return warps.reshape(lanes // WARPGROUP, ROWS, warps.shape[2])


def matrix_to_registers(d: np.ndarray, d_type: str = "f32") -> np.ndarray:
    """Accumulators (64, N) or (warpgroups, 64, N) as registers (number, 128 * warpgroups), one row a register.

    f32 and s32: N // 2 registers of the dtype of `d`.  f16: N // 4 of uint32, from values that f16 holds.
    """
    n = d.shape[-1]
    parts = d.reshape(-1, 4, 2, 8, n // 8, 4, 2)  # warpgroup, warp, half, group, block, thread, element
    lanes = parts.shape[0] * WARPGROUP
    if d_type != "f16":
        return parts.transpose(4, 2, 6, 0, 1, 3, 5).reshape(n // 2, lanes)
    pairs = parts.transpose(4, 2, 0, 1, 3, 5, 6).astype(np.float16, order="C")
    return pairs.reshape(-1).view(np.uint32).reshape(n // 4, lanes)


def registers_to_matrix(registers: np.ndarray, d_type: str = "f32") -> np.ndarray:
    """Accumulators (warpgroups, 64, N) from registers (number, 128 * warpgroups): the inverse of `matrix_to_registers`.

    f32 and s32 keep their dtype, f16 (uint32) becomes float32.
    """
    number, lanes = registers.shape
    if d_type != "f16":
        parts = registers.reshape(number // 4, 2, 2, lanes // WARPGROUP, 4, 8, 4)
        return parts.transpose(3, 4, 1, 5, 0, 6, 2).reshape(-1, ROWS, number * 2)
    pairs = registers.view(np.float16).reshape(number // 2, 2, lanes // WARPGROUP, 4, 8, 4, 2)
    return pairs.transpose(2, 3, 1, 4, 0, 5, 6).reshape(-1, ROWS, number * 4).astype(np.float32)
