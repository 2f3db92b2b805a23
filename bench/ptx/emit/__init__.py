"""What each instruction becomes: one module for each kind of instruction, found by its name.

An emitter writes Python lines by `generate.Generator`; the functions that these call are in the modules that `helpers`
names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rooflab.bench.ptx.emit import control, copies, floats, integer, matrix, memory, moves, sync, warp
from rooflab.bench.ptx.execute import atomics, bulk, copying, maps, matrices, remote, synchronising, warps
from rooflab.bench.ptx.machine import access
from rooflab.bench.ptx.numbers import (
    approximate,
    arithmetic,
    bitfields,
    carry,
    convert,
    extremes,
    half,
    integers,
    permute,
    rounding,
)
from rooflab.bench.ptx.numbers.bits import pick

__all__ = ["control", "copies", "floats", "helpers", "integer", "matrix", "memory", "moves", "sync", "warp"]


def choose(predicate: Any, value: Any, otherwise: Any) -> Any:
    """`value` where the predicate holds, and `otherwise` elsewhere."""
    if predicate.__class__ is np.bool_:
        return value if predicate else otherwise
    return np.where(predicate, value, otherwise)


def helpers() -> dict[str, Any]:
    """The names that generated code may use."""
    modules = (
        access, approximate, arithmetic, atomics, bitfields, bulk, carry, convert, copying, extremes, half, integers,
        maps, matrices, permute, remote, rounding, synchronising, warps,
    )  # fmt: skip
    names: dict[str, Any] = {module.__name__.rsplit(".", 1)[-1]: module for module in modules}
    types = {f"{kind}{size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)}
    types |= {f"f{size}": np.dtype(f"f{size}") for size in (4, 8)}
    return names | types | {"np": np, "bool_": np.bool_, "choose": choose, "pick": pick}
