"""Helpers for tests of compiled kernels: requests with their results, and the check of footprints against them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.kernels.registry import get_kernel
from rooflab.roofline.occupancy import HOPPER


def compiled(requests: Sequence[KernelCase]) -> Iterator[tuple[KernelCase, CompiledInfo]]:
    """Each request with the first kernel that it launches."""
    for request, found in zip(requests, compile_kernels(requests, Store()), strict=True):
        assert not isinstance(found, CompileFailure), f"{request}: {found}"
        yield request, found[0]


def assert_is_its_footprint(request: KernelCase, info: CompiledInfo) -> None:
    """A CTA needs what its config's footprint says, and up to 1 KiB more; no loop with a product spills."""
    tuning = get_kernel(request.op, request.kernel).tuning
    config = request.config or tuning.heuristic(request.case, request.scheme)
    size = tuning.footprint(config, request.case, request.scheme)
    assert info.threads == size.threads and size.registers <= info.registers and size.ctas == info.ctas, config
    assert size.shared_bytes <= info.shared_bytes <= size.shared_bytes + 1024 <= HOPPER.shared_bytes, config
    loops = [body for body in info.loops if body.innermost and body.counts["wgmma"]]
    assert loops and not any(body.counts["spill_load"] + body.counts["spill_store"] for body in loops), config
