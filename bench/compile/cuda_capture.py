"""Turns every CUDA C++ launch of `kernels/_cuda.py` into a compilation, with no GPU: runs in the compiling process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rooflab.bench.compile.capture import Launch

_IGNORED_OPTION = re.compile(r"^-{1,2}(I|include-path|std)")


@contextmanager
def recording_cuda(arch: str, launches: list[Launch]) -> Iterator[None]:
    """Makes every launch of a `CudaKernel` a compilation for `arch`, and appends it to `launches`.

    Does nothing where the tree has no `kernels/_cuda.py`, as those before it.  The class itself is changed, so that it
    does not matter how a kernel's module imported `load`.
    """
    try:
        _cuda = import_module("rooflab.kernels._cuda")
    except ModuleNotFoundError as error:
        if error.name != "rooflab.kernels._cuda":
            raise
        yield
        return
    call = _cuda.CudaKernel.__call__

    def compile_only(
        self: Any, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0
    ) -> None:
        for index, argument in enumerate(arguments):
            _cuda._value(index, argument)  # what a launch would refuse
        launches.append(_launch(_cuda, self, arch, tuple(grid), tuple(block), shared_bytes))

    _cuda.CudaKernel.__call__ = compile_only
    try:
        yield
    finally:
        _cuda.CudaKernel.__call__ = call


def _launch(
    cuda: Any, kernel: Any, arch: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int
) -> Launch:
    threads, ctas = 1, 1
    for size in block:
        threads *= int(size)
    for size in grid:
        ctas *= int(size)
    source = repr((kernel.source, kernel.options))
    return Launch(
        name=kernel.name,
        backend="cuda",
        target=arch,
        grid=tuple(int(size) for size in grid),
        num_warps=-(-threads // 32),
        num_stages=0,
        cubin=cuda.compile_cubin(kernel.source, arch=arch, options=kernel.options),
        ptx="",
        shared_bytes=int(shared_bytes),
        threads=threads,
        ctas=ctas,
        asked={"options": " ".join(option for option in kernel.options if not _IGNORED_OPTION.match(option))},
        source_hash=hashlib.sha256(source.encode()).hexdigest(),
        log=lambda: cuda.compiler_log(kernel.source, arch=arch, options=kernel.options),
    )
