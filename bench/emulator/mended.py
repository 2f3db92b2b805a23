"""Compiles PTX with ptxas.  Reads the register count, and whether ptxas mended the code of wgmmas."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal

from rooflab.bench.compile.sass import parse

FENCE, WAIT = frozenset(("C7519", "C7520")), frozenset(("C7517",))
"""The codes of the notes in which ptxas says that it added a `wgmma.fence` or a `wgmma.wait_group`."""
A_REGISTERS = 4
"""The registers of A of one wgmma, which are 64 rows of 32 bytes for 128 threads."""
MOST_GROUPS = 8
"""The most groups of wgmmas in flight that `touches` follows."""


def notes_of(ptx: str) -> frozenset[str]:
    """Returns the codes of ptxas's notes (such as `C7517`) on PTX for sm_90a.  Raises `ValueError` if ptxas fails."""
    return frozenset(re.findall(r"\((C\d+)\)", _log(ptx)))


def registers_of(ptx: str, name: str) -> int:
    """Returns the registers per thread that ptxas gives the kernel `name`.  Raises `ValueError` if ptxas fails."""
    register_match = re.search(rf"entry function '{re.escape(name)}'.*?Used (\d+) registers", _log(ptx), re.DOTALL)
    assert register_match is not None, "ptxas says it of each kernel"
    return int(register_match[1])


def touches(ptx: str, name: str, operand: Literal["A", "accumulator"]) -> bool:
    """Returns whether the machine code that ptxas makes of the kernel `name` writes a register of A, or reads or writes
    an accumulator, on a path between a wgmma and the wait for it.  Raises `ValueError` if ptxas fails."""
    code = {instruction.address: instruction for instruction in parse(_log(ptx, True))[name].instructions}
    following, seen = dict(pairwise(code)), set[tuple[int | None, tuple[frozenset[str], ...]]]()
    paths: list[tuple[int | None, tuple[frozenset[str], ...]]] = [(next(iter(code)), (frozenset(),))]
    while paths:
        path = address, groups = paths.pop()
        if address is None or path in seen:
            continue
        seen.add(path)
        at = code[address]
        if at.is_wgmma:
            first, count = re.fullmatch(r"R(\d+)", at.arguments[operand == "A"]), A_REGISTERS
            if operand == "accumulator" and at.mma_shape is not None:  # two fp16 sums share one
                count = at.mma_shape[1] // (4 if "F16" in at.modifiers and "F32" not in at.modifiers else 2)
            registers = {f"R{int(first[1]) + place}" for place in range(count)} if first is not None else set()
            groups = (*groups[-MOST_GROUPS:-1], groups[-1] | registers, *([frozenset[str]()] if at.commits else ()))
        elif any((at.writes if operand == "A" else at.reads | at.writes) & registers for registers in groups):
            return True
        elif at.groups_left is not None:
            groups = groups[-1 - at.groups_left :]
        paths.append((at.target, groups))
        if not (at.name in ("BRA", "EXIT") and not at.guard):
            paths.append((following.get(address), groups))
    return False


@cache
def release() -> str:
    """Returns the release of Triton's ptxas, such as `12.8`."""
    command = [str(_tool("ptxas")), "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return answer.partition("release ")[2].partition(",")[0]


@lru_cache(maxsize=32)
def _log(ptx: str, dumps: bool = False) -> str:
    """Returns what ptxas says of the PTX or, with `dumps`, the machine code."""
    process = _assemble(ptx, dumps)
    version_match = re.search(r"Unsupported \.version .*current version is '([\d.]+)'", process.stderr)
    if version_match is not None:  # an NVRTC newer than Triton's ptxas; sm_90a's instructions are older than both
        process = _assemble(re.sub(r"\.version\s+[\d.]+", f".version {version_match[1]}", ptx, count=1), dumps)
    if process.returncode:
        raise ValueError(f"ptx: ptxas refuses it:\n{process.stderr.strip()}")
    return process.stdout if dumps else process.stderr


def _tool(name: str) -> Path:
    triton_spec = find_spec("triton")
    assert triton_spec is not None and triton_spec.origin is not None, "a requirement of this package"
    return Path(triton_spec.origin).parent / "backends" / "nvidia" / "bin" / name


def _assemble(ptx: str, dumps: bool) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as temp_folder:
        ptx_file = Path(temp_folder, "kernel.ptx")
        ptx_file.write_text(ptx)
        cubin = f"{temp_folder}/kernel.cubin"
        command = [str(_tool("ptxas")), "-v", "--gpu-name=sm_90a", str(ptx_file), "-o", cubin]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if process.returncode or not dumps:
            return process
        command = [str(_tool("cuobjdump")), "-sass", cubin]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
