"""Compiles PTX with ptxas.  Reads the register count, and whether ptxas mended the code by a fence or a wgmma wait."""

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
    """Returns the codes of ptxas's notes (such as `C7517`) on PTX for sm_90a.  Raises `ValueError` if ptxas fails."""
    return frozenset(re.findall(r"\((C\d+)\)", _log(ptx)))


def registers_of(ptx: str, name: str) -> int:
    """Returns the registers per thread that ptxas gives the kernel `name`.  Raises `ValueError` if ptxas fails."""
    register_match = re.search(rf"entry function '{re.escape(name)}'.*?Used (\d+) registers", _log(ptx), re.DOTALL)
    assert register_match is not None, "ptxas says it of each kernel"
    return int(register_match[1])


@lru_cache(maxsize=32)
def _log(ptx: str) -> str:
    triton_spec = find_spec("triton")
    assert triton_spec is not None and triton_spec.origin is not None, "a requirement of this package"
    ptxas_path = Path(triton_spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    process = _assemble(ptxas_path, ptx)
    version_match = re.search(r"Unsupported \.version .*current version is '([\d.]+)'", process.stderr)
    if version_match is not None:  # an NVRTC newer than Triton's ptxas; sm_90a's instructions are older than both
        process = _assemble(ptxas_path, re.sub(r"\.version\s+[\d.]+", f".version {version_match[1]}", ptx, count=1))
    if process.returncode:
        raise ValueError(f"ptx: ptxas refuses it:\n{process.stderr.strip()}")
    return process.stderr


def _assemble(tool: Path, ptx: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as temp_folder:
        ptx_file = Path(temp_folder, "kernel.ptx")
        ptx_file.write_text(ptx)
        ptxas_command = [str(tool), "-v", "--gpu-name=sm_90a", str(ptx_file), "-o", f"{temp_folder}/kernel.cubin"]
        return subprocess.run(ptxas_command, capture_output=True, text=True, timeout=300, check=False)
