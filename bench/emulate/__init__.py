"""Kernels run by the PTX emulator (`ptx/`) where there is no GPU: checks, bytes, golden outputs."""

from rooflab.bench.emulate.emulating import emulating

__all__ = ["emulating"]
