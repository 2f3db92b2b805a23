"""Imports all kernels, so that a process that waits for a save has them before it needs them."""

from rooflab.kernels import registry

registry.every_kernel()
