"""Defines the exceptions that end a check if a kernel has a fault or refuses the inputs."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from rooflab.bench.base.ptxas import errors_of
from rooflab.bench.core.record import Status
from rooflab.kernels.takes import Refusal


class LayoutRefused(Exception):
    """The launcher refused a memory layout with a `ValueError`.  This is not a fault of the kernel."""


class Failed(Exception):
    """Ends a check or a timing, and holds the status and the reason."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason

    @classmethod
    def by(cls, refusal: Refusal | str) -> Failed:
        """Makes a `Failed` from a kernel's refusal of its inputs: a `Refusal`, or the text of an exception."""
        if isinstance(refusal, str):
            failure_status, _, refusal_reason = refusal.partition(": ")
            return cls("UNAVAILABLE" if failure_status == "UNAVAILABLE" else "UNSUPPORTED", refusal_reason)
        return cls(refusal.status, refusal.reason)

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> Failed:
        """Makes a `Failed` from an exception of a kernel.  If `where` is given, the reason begins with `where`."""
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        from rooflab.kernels._cuda import CudaCompileError

        error_text = str(error).strip()
        if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in error_text:
            return cls("OUT_OF_MEMORY", error_text)
        if isinstance(error, ValueError) and error_text.startswith(("UNSUPPORTED: ", "UNAVAILABLE: ")):
            return cls.by(error_text)
        if isinstance(error, PTXASError):  # its place is in Triton, and its text has the command too
            return cls(
                "COMPILE_ERROR", f"{where + ': ' if where else ''}ptxas refuses the code:\n{errors_of(error_text)}"
            )
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        file_line = f"{Path(last_frame.filename).name}:{last_frame.lineno}"
        failure_reason = f"{where + ': ' if where else ''}{type(error).__name__}: {error_text} ({file_line})"
        is_compile_error = isinstance(error, CompilationError | OutOfResources | CudaCompileError)
        return cls("COMPILE_ERROR" if is_compile_error else "RUNTIME_ERROR", failure_reason)

    @staticmethod
    def errors() -> tuple[type[BaseException], ...]:
        """Returns the exception types that are faults of the kernel.  Any other exception is a fault of the checker."""
        from triton.errors import TritonError  # not at the top: the first import of Triton fixes its interpreter mode

        return (
            TritonError,
            RuntimeError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            AssertionError,
            ArithmeticError,
            MemoryError,
            ImportError,
            OSError,
            SystemExit,
        )
