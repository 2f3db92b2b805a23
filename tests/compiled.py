"""Compiles one kernel for Hopper, for tests of its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.reference.spec import Case, Scheme


def compile_kernel(
    op: str, kernel_name: str, case: Case, scheme: Scheme, *, file: Path | None = None, config: Any = None
) -> list[CompiledInfo]:
    """Every kernel of ours that a call launches.  Raises `CompileFailure` where one does not compile."""
    found = compile_kernels([KernelCase(op, kernel_name, case, scheme, file, config)], Store())[0]
    if isinstance(found, CompileFailure):
        raise found
    return found
