"""Loads a kernel from PTX text: parses the text, and provides the functions that the generated Python code calls."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from rooflab.bench.emulator.emit import arithmetic, control, matrix, memory_access, moves
from rooflab.bench.emulator.emit.generator import Generator
from rooflab.bench.emulator.execute import atomics, bulk, copying, matrices, printing, synchronising, tensor_maps, warps
from rooflab.bench.emulator.machine import access
from rooflab.bench.emulator.machine.waiting import waiting_of
from rooflab.bench.emulator.numbers import approximate, bitfields, bits, floats, formats, half, integers
from rooflab.bench.emulator.text.parse import parse
from rooflab.bench.emulator.text.program import Program
from rooflab.bench.emulator.text.syntax import PtxError

EMITTERS = (arithmetic, control, matrix, memory_access, moves)
"""Importing these modules registers the emitters of their instructions."""


def choose(predicate: Any, value: Any, otherwise: Any) -> Any:
    """Returns `value` where `predicate` is true, and `otherwise` elsewhere."""
    if predicate.__class__ is np.bool_:
        return value if predicate else otherwise
    return np.where(predicate, value, otherwise)


def _names() -> dict[str, Any]:
    """Returns the names that generated Python code may use, with their values."""
    modules = (
        access,
        approximate,
        atomics,
        bitfields,
        bits,
        bulk,
        copying,
        floats,
        formats,
        half,
        integers,
        matrices,
        printing,
        synchronising,
        tensor_maps,
        warps,
    )
    value_by_name: dict[str, Any] = {module.__name__.rsplit(".", 1)[-1]: module for module in modules}
    numpy_types = {name: np.dtype(name) for name in "i1 i2 i4 i8 u1 u2 u4 u8 f4 f8".split()}
    return value_by_name | numpy_types | {"np": np, "bool_": np.bool_, "choose": choose, "waiting_of": waiting_of}


@lru_cache(maxsize=64)
def load(text: str, name: str | None = None) -> Program:
    """Loads the kernel `name` of a PTX text, or its only kernel if `name` is None.  Raises `PtxError` if this fails."""
    module = parse(text)
    if name is None and len(module.entries) != 1:
        raise PtxError(f"kernel: expected a name, as the PTX has {', '.join(module.entries) or 'no kernel'}")
    kernel = module.kernel(next(iter(module.entries)) if name is None else name)
    return Program(module.version, kernel, lambda flow: Generator(flow, _names()).function)
