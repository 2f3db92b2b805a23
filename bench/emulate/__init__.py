"""Kernels run in the emulator (`emulator/`) where there is no GPU: checks, bytes, golden outputs."""

from rooflab.bench.emulate.ours import emulating

__all__ = ["emulating"]
