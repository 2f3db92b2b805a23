"""Asks ptxas about a kernel: its registers, and whether ptxas adds a missing fence or a missing wait of wgmma."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

FENCE, WAIT = "C7519", "C7517"
"""The codes of the notes in which ptxas says that it added a `wgmma.fence` or a `wgmma.wait_group`."""


def notes_of(ptx: str) -> frozenset[str]:
    """The codes of the notes of Triton's ptxas on PTX for sm_90a.  Raises `ValueError` if ptxas refuses the PTX."""
    return frozenset(re.findall(r"\((C\d+)\)", _log(ptx)))


def registers_of(ptx: str, name: str) -> int:
    """The registers of a thread of the kernel `name`.  Raises `ValueError` where ptxas refuses the PTX."""
    used = re.search(rf"entry function '{re.escape(name)}'.*?Used (\d+) registers", _log(ptx), re.DOTALL)
    assert used is not None, "ptxas says it of each kernel"
    return int(used[1])


@lru_cache(maxsize=32)
def _log(ptx: str) -> str:
    package = find_spec("triton")
    assert package is not None and package.origin is not None, "a requirement of this package"
    tool = Path(package.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    done = _assemble(tool, ptx)
    supported = re.search(r"Unsupported \.version .*current version is '([\d.]+)'", done.stderr)
    if supported is not None:  # an NVRTC newer than Triton's ptxas; sm_90a's instructions are older than both
        done = _assemble(tool, re.sub(r"\.version\s+[\d.]+", f".version {supported[1]}", ptx, count=1))
    if done.returncode:
        raise ValueError(f"ptx: ptxas refuses it: {done.stderr.strip()}")
    return done.stderr


def _assemble(tool: Path, ptx: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [str(tool), "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
