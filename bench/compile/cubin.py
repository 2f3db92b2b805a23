"""What a cubin holds, read with the tools that Triton bundles; no GPU and no CUDA toolkit is needed."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

from rooflab.bench.compile import sass

TIMEOUT_S = 120.0
_RESERVED = 1024
"""Bytes of a block's shared memory that the driver keeps for itself."""
_FUNCTION = re.compile(r"^\s*Function (\S+):\s*\n\s*(.*)$", re.MULTILINE)
_PROGRAM_HEADERS = struct.Struct("<32xQ14xHH")
"""Where they begin, the size of one and their number, in a 64-bit ELF header."""
_SECTION_HEADERS = struct.Struct("<40xQ10xHHH")
"""Where they begin, the size of one, their number, and which of them holds the names."""
_SECTION = struct.Struct("<II16xQQ")
"""A section's name, kind, place in the file and size."""
_NO_BYTES = 8
"""The kind of a section that has a size and nothing in the file."""
_CODE = (".text", ".nv.constant", ".nv.global", ".rodata")
"""Sections that decide what runs; others hold line numbers and the names of files."""


@dataclass(frozen=True)
class Cubin:
    """One kernel of a cubin."""

    target: str
    """`sm_90a`."""
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread, spilled registers and local arrays."""
    static_shared_bytes: int
    """Per block, what the code declares itself."""
    sass: str
    """As `cuobjdump -sass` prints it."""
    indirect: dict[int, tuple[int, ...]]
    """Where its indirect branches may go, by their address."""


def read_cubin(cubin: bytes, name: str) -> Cubin:
    """The kernel called `name`.  Raises `RuntimeError` where the tools fail, `ValueError` where it is not there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(_whole(cubin))
        text = _run("cuobjdump", "-res-usage", "-sass", str(path))
        usage, code = _function(text, name)
        indirect: dict[int, tuple[int, ...]] = {}
        if re.search(r"\b(?:BRXU?|JMXU?) ", code):
            indirect = dict(sass.parse(_run("nvdisasm", "-c", str(path)))[name].indirect)
    target = re.search(r"^\s*code for (\w+)$", text, re.MULTILINE)
    if target is None:
        raise RuntimeError(f"cuobjdump: expected the target of {name}, got {text[:200]!r}")
    figures = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    if set(figures) != {"REG", "STACK", "SHARED"}:
        raise RuntimeError(f"cuobjdump: expected registers, stack and shared memory of {name}, got {usage!r}")
    shared = figures["SHARED"]
    if int(re.sub(r"\D", "", target[1])) >= 90 and shared >= _RESERVED:
        # From sm_90 on the figure counts what the driver keeps for itself, which ptxas -v leaves out (12.8, 13.5).
        shared -= _RESERVED
    return Cubin(target[1], figures["REG"], figures["STACK"], shared, code, indirect)


def _whole(cubin: bytes) -> bytes:
    """`cubin` with the last bytes that its header counts: CuPy 14 returns a cubin of NVRTC without its last byte, which
    is zero, as if it ended a text, and the tools take what is left for no ELF file."""
    offset, size, number = _PROGRAM_HEADERS.unpack_from(cubin)
    missing = offset + size * number - len(cubin)
    return cubin + b"\0" * missing if missing in (1, 2) else cubin


def code_hash(cubin: bytes) -> str:
    """sha256 of the instructions and constants: the same for code whose source only moved to other lines."""
    offset, size, number, names = _SECTION_HEADERS.unpack_from(cubin)
    sections = [_SECTION.unpack_from(cubin, offset + size * index) for index in range(number)]
    texts = sections[names][2]
    parts = []
    for name, kind, start, length in sections:
        place = texts + name
        label = cubin[place : cubin.index(b"\0", place)].decode()
        if label.startswith(_CODE):
            parts.append((label, length, b"" if kind == _NO_BYTES else cubin[start : start + length]))
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()


def _function(text: str, name: str) -> tuple[str, str]:
    """The line of resources and the code of one function, in what cuobjdump prints of a whole cubin."""
    found = {match[1]: match[2] for match in _FUNCTION.finditer(text)}
    if name not in found:
        raise ValueError(f"kernel: expected one of {', '.join(found) or 'none'} in the compiled code, got {name!r}")
    pieces = re.split(r"(?m)^(?=\s+Function : )", text)
    code = next((piece for piece in pieces if re.match(rf"\s+Function : {re.escape(name)}\s", piece)), "")
    if not code:
        raise RuntimeError(f"cuobjdump: expected the code of {name}, got none")
    return found[name], code


def _run(tool: str, *options: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run([str(path), *options], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{tool}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
