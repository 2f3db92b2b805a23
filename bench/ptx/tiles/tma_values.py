"""What a tiled TMA copy does to values: fills, conversions on load, and reductions into global memory."""

from __future__ import annotations

import numpy as np

from rooflab.bench.ptx.numbers.formats import decode, encode
from rooflab.bench.ptx.tiles.tensor_map import ELEMENT_BYTES, TensorMap

_WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_KINDS = {"u": "u", "s": "i"}
_WHOLE = ("u32", "s32", "u64", "s64")
REDUCIBLE = {
    "add": ("u32", "s32", "u64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz"),
    **dict.fromkeys(("min", "max"), (*_WHOLE, "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), _WHOLE),
}
"""Elements by reduction: what ptxas takes for `cp.reduce.async.bulk`, and Triton for tensors."""
_ARITHMETIC = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def fill_unit(tensor: TensorMap, unit_bytes: int) -> np.ndarray:
    """What a load writes for a unit out of bounds: (unit_bytes,) uint8.

    Zeros, or one NaN per element: all bits but the sign, PTX's canonical NaN (the ISA calls it a special NaN and gives
    no bits).
    """
    size = tensor.element_bytes
    if tensor.fill == "zero":
        return np.zeros(unit_bytes, np.uint8)
    nan = np.array((1 << (8 * size - 1)) - 1, _WORDS[size])
    return np.tile(nan.reshape(1).view(np.uint8), unit_bytes // size)


def loaded(bits: np.ndarray, element: str) -> np.ndarray:
    """Raw elements (unsigned, any shape) as a load through a map of type `element` writes them.

    tf32 and tf32.ftz are rounded to 10 bits of mantissa, to nearest even; .ftz types lose subnormals, keeping the sign.
    All others are copied.
    """
    if element.endswith(".ftz"):
        bits = np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))
    if element.startswith("tf32"):
        bits = np.asarray(encode(bits.view(np.float32), "tf32")).view(np.uint32)
    return bits


def reduce_values(op: str, old: np.ndarray, new: np.ndarray, element: str) -> np.ndarray:
    """What `cp.reduce.async.bulk.tensor` leaves in memory: `old` combined with `new`, raw elements of one shape.

    PTX ISA 8.7, `red` and `cp.reduce.async.bulk.tensor`: `op` is add, min, max, inc, dec, and, or, xor; `element` is
    one of `tensor_map.ELEMENTS`.  f16 and bf16 are added in float32 and rounded to nearest even, keeping subnormals;
    of a number and a NaN, min and max take the number.  inc and dec are those of u32.  Raises `ValueError` on a
    combination that PTX does not have.
    """
    if element not in REDUCIBLE[op]:
        raise ValueError(f"op: expected a reduction that {element} has, got {op!r}")
    word = _WORDS[ELEMENT_BYTES[element]]
    whole = element[0] in _KINDS
    old, new = old.view(word), new.view(word)
    if op == "inc":
        return np.where(old >= new, np.uint32(0), old + np.uint32(1))
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - np.uint32(1))
    combine = _ARITHMETIC[op]
    if element in ("f16", "bf16"):
        return np.asarray(encode(combine(decode(old, element), decode(new, element)), element))
    kind = f"{_KINDS[element[0]] if whole else 'f'}{word().itemsize}"
    found: np.ndarray = combine(old.view(kind), new.view(kind)).view(word)
    return loaded(found, element) if element.endswith(".ftz") else found
