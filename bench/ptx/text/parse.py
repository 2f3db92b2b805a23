"""Parses PTX into kernels: scopes and labels made unique, calls put in place, source lines kept.

Grammar: PTX ISA 8.7, sections 4 to 7 and 11.  What is not known raises `PtxError`; nothing is skipped.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache, partial

from rooflab.bench.ptx.text.body import Body
from rooflab.bench.ptx.text.declarations import parameters, variable
from rooflab.bench.ptx.text.operands import split
from rooflab.bench.ptx.text.statements import Function, split_module, statements, strip_comments
from rooflab.bench.ptx.text.syntax import Kernel, Module, PtxError, Variable

REGISTERS = 65536
"""Of a multiprocessor."""
MOST_REGISTERS = 256
"""Of a thread, in the units in which warps are given them."""
TARGETS = ("sm_90", "sm_90a")
"""What is run: instructions of older targets are part of these, and Blackwell's are not known."""


@lru_cache(maxsize=256)
def parse(text: str) -> Module:
    """The module that `text` is; its kernels are read when they are asked for.

    Raises `PtxError` on a text that is no PTX, and on one for another target than Hopper.
    """
    plain = strip_comments(text)
    version = re.search(r"^\s*\.version\s+([\d.]+)", plain, re.MULTILINE)
    target = re.search(r"^\s*\.target\s+(\w+)", plain, re.MULTILINE)
    if version is None or target is None:
        raise PtxError(f"PTX: expected a text with .version and .target, got {text[:60]!r}")
    if target[1] not in TARGETS:
        raise PtxError(f"PTX: expected the target {' or '.join(TARGETS)}, got {target[1]}")
    outer, functions = split_module(plain)
    shared: dict[str, Variable] = {}
    for piece in outer:
        for statement in statements(piece):
            if statement.kind == "text" and (found := variable(statement.text)) is not None:
                shared[found.name] = found
    files = {int(number): name for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', plain)}
    callable_ = {function.name: function for function in functions if not function.is_entry}
    module = Module(version[1], target[1], files=files)
    for function in functions:
        if function.is_entry:
            module.entries[function.name] = partial(_kernel, function, shared, callable_, files)
    return module


def _kernel(
    function: Function, outer: dict[str, Variable], functions: dict[str, Function], files: dict[int, str]
) -> Kernel:
    own = parameters(function.parameters)
    body = Body(functions, files, outer)
    body.enter_kernel(own)
    body.read(function.body)
    block, most = (_triple(function.directives, name) for name in ("reqntid", "maxntid"))
    return Kernel(
        name=function.name,
        parameters=own,
        registers=body.registers,
        instructions=body.instructions,
        labels=body.labels,
        tables=body.tables,
        variables=body.variables,
        block=block,
        most_threads=math.prod(most) if most else None,
        cluster=_triple(function.directives, "reqnctapercluster"),
        max_registers=_single(function.directives, "maxnreg") or _share(function.directives, block or most),
    )


def _triple(directives: str, name: str) -> tuple[int, int, int] | None:
    found = re.search(rf"\.{name}\s+([\d\s,]+)", directives)
    if not found:
        return None
    sizes = [int(size) for size in split(found[1])]
    x, y, z = (sizes + [1, 1])[:3]
    return x, y, z


def _share(directives: str, block: tuple[int, int, int] | None) -> int | None:
    """Registers a thread where a multiprocessor is divided among as many CTAs as `.minnctapersm` says."""
    ctas = _single(directives, "minnctapersm")
    if not ctas or block is None:
        return None
    threads = -(-block[0] * block[1] * block[2] // 32) * 32
    return min(REGISTERS // (ctas * threads) // 8 * 8, MOST_REGISTERS)


def _single(directives: str, name: str) -> int | None:
    found = re.search(rf"\.{name}\s+(\d+)", directives)
    return int(found[1]) if found else None
