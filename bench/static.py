"""Compiles Triton kernels for Hopper with no GPU, and reads what came out: registers, spills, wgmma, TMA.

Triton's bundled `ptxas` needs no device, and its bundled `cuobjdump` reads the cubin. The work is done in processes of
their own (`_compile_worker.py`), because in a process under Triton's interpreter nothing can be compiled.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from rooflab.kernels.registry import Kernel, get_kernel
from rooflab.reference.spec import Case, Scheme

SM = 90
TIMEOUT_S = 300.0
"""A compile takes about half a second; one that takes this long will not end."""


class CompileFailure(RuntimeError):
    """A kernel did not compile; the text is the compiler's or the launcher's."""


@dataclass(frozen=True)
class CompiledInfo:
    """One compiled kernel of one launch."""

    name: str
    target: str
    """`sm_90a`."""
    grid: tuple[int, ...]
    launches: int
    """How often the launcher launched this kernel on this grid."""
    num_warps: int
    num_stages: int
    threads: int
    """Per block; more than 32 * num_warps where warps are specialised."""
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread, spilled registers included."""
    shared_bytes: int
    """Per block."""
    opcodes: Mapping[str, int]
    """How often each SASS instruction occurs, modifiers included (`HGMMA.64x128x16.F32.BF16`)."""
    ptx: str
    sass: str

    def count(self, *families: str) -> int:
        """Instructions of these families, the part before the first dot (`HGMMA`, `LDL`)."""
        return sum(number for opcode, number in self.opcodes.items() if opcode.split(".")[0] in families)

    @property
    def spill_loads(self) -> int:
        """Loads from thread-local memory in the code."""
        return self.count("LDL")

    @property
    def spill_stores(self) -> int:
        """Stores to thread-local memory in the code."""
        return self.count("STL")

    @property
    def uses_wgmma(self) -> bool:
        """Whether warpgroup tensor-core instructions are there, Hopper's only way to its full matrix rate."""
        return self.count("HGMMA", "IGMMA", "QGMMA", "BGMMA") > 0

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether any tensor-core instruction is there, wgmma or the older mma."""
        return self.uses_wgmma or self.count("HMMA", "IMMA", "QMMA", "DMMA") > 0

    @property
    def uses_tf32(self) -> bool:
        """Whether a matrix product rounds its fp32 operands to TF32's 10 bits."""
        return ".tf32" in self.ptx

    @property
    def uses_tma(self) -> bool:
        """Whether tiles come or go by the tensor memory accelerator."""
        return self.count("UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF") > 0

    @property
    def uses_warp_specialization(self) -> bool:
        """Whether registers move between warps, which only specialised warps do."""
        return "setmaxnreg" in self.ptx


class Request(NamedTuple):
    """What to compile."""

    op: str
    kernel: str
    case: Case
    scheme: Scheme
    file: Path | None = None
    """The file that registers the kernel, where it is not in the tree."""


def compile_kernel(
    op: str, kernel_name: str, case: Case, scheme: Scheme, *, file: Path | None = None
) -> list[CompiledInfo]:
    """Every Triton kernel that `op`/`kernel_name` launches for `case`, compiled for sm_90 with no GPU.

    Raises `ValueError` on a kernel that is not Triton's, and `CompileFailure` where it does not compile, refuses the
    case, or reads the values of its tensors, which are meta here.
    """
    found = compile_kernels([Request(op, kernel_name, case, scheme, file)])[0]
    if isinstance(found, CompileFailure):
        raise found
    return found


def compile_kernels(requests: Sequence[Request]) -> list[list[CompiledInfo] | CompileFailure]:
    """`compile_kernel` of every request, in their order, on all cores; a failure stands in the place of its result.

    Raises `ValueError` on a kernel that is not Triton's.
    """
    for request in requests:
        if request.file is None:
            _check_backend(get_kernel(request.op, request.kernel))
    return list(_pool().map(_attempt, requests))


def _attempt(request: Request) -> list[CompiledInfo] | CompileFailure:
    try:
        return _compile(request)
    except CompileFailure as failure:
        return failure


def _check_backend(kernel: Kernel) -> None:
    if kernel.backend not in ("triton", "gluon"):
        raise ValueError(f"kernel: expected a Triton kernel, got {kernel.id}, whose backend is {kernel.backend}")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1)), thread_name_prefix="compile")


_idle: queue.LifoQueue[_Worker] = queue.LifoQueue()


class _Worker:
    """One compiling process, started at its first request and kept for the next."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile()  # as long-lived as the process that writes it
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rooflab.bench._compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            text=True,
        )
        atexit.register(self.stop)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer.  Raises `CompileFailure` where it dies or takes longer than `TIMEOUT_S`."""
        timer = threading.Timer(TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            _pipe(self.process.stdin).write(json.dumps(request) + "\n")
            _pipe(self.process.stdin).flush()
            line = _pipe(self.process.stdout).readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = self.process.wait()
        self.log.seek(0)
        tail = self.log.read().decode(errors="replace").strip()[-2000:]
        raise CompileFailure(f"the compiling process ended with status {status}: {tail}")

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            _pipe(pipe).close()
        self.log.close()
        atexit.unregister(self.stop)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "Popen was given PIPE"
    return pipe


def _compile(request: Request) -> list[CompiledInfo]:
    try:
        worker = _idle.get_nowait()
    except queue.Empty:
        worker = _Worker()
    message = {
        "op": request.op,
        "kernel": request.kernel,
        "case": dict(request.case),
        "scheme": request.scheme.name,
        "file": str(request.file) if request.file else None,
        "sm": SM,
    }
    try:
        found = worker.ask(message)
    except CompileFailure:
        worker.stop()
        raise
    _idle.put(worker)
    if "error" in found:
        name = f"{request.op}/{request.kernel} at {request.case.id} in {request.scheme.name}"
        raise CompileFailure(f"{name}: {found['error']} ({found['where']})")
    return [CompiledInfo(**{**kernel, "grid": tuple(kernel["grid"])}) for kernel in found["kernels"]]
