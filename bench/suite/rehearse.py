"""The rehearsal of an entry: it compiles each kernel for each case, in place of a check and a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from triton.backends.nvidia import driver

from rooflab.bench.compile.capture import Launch
from rooflab.bench.compile.cases import has_code
from rooflab.bench.compile.worker import FAILURES, launches_of
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

compiled: set[str] = set()
"""Hashes of the kernels that this process compiled."""


def rehearse(kernels: Sequence[Kernel], cases: Sequence[Case], schemes: Sequence[Scheme]) -> None:
    """Compiles what each kernel with code of our own launches.  What fails here fails in the entry, which says so."""
    for case in cases:
        for scheme in schemes:
            for kernel in filter(has_code, kernels):
                with suppress(*FAILURES):
                    for launch in launches_of(kernel, case, scheme):
                        if launch.source_hash not in compiled:
                            compiled.add(launch.source_hash)
                            _launcher(launch)


def _launcher(launch: Launch) -> None:
    """Triton 3.6 also compiles C code, which launches kernels of one signature; later versions have one for all."""
    if launch.compiled is not None and hasattr(driver, "make_launcher"):
        driver.CudaLauncher(launch.compiled.src, launch.compiled.metadata)
