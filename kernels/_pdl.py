"""Programmatic dependent launch (PDL) of Triton kernels, for Hopper and later (CUDA C++ Programming Guide, section
"Programmatic Dependent Launch and Synchronization").

A kernel that is launched so may start while the kernel before it on the stream still works.  It asks for what no kernel
of a step writes, such as weights and tables, waits until the kernel before is complete, and only then reads or writes
anything else.  The kernel before decides when: here at once, because the kernels are small and leave room on the SMs;
a kernel that says nothing counts when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on = ContextVar("pdl", default=False)


@contextmanager
def pdl(on: bool = True) -> Iterator[None]:
    """Within it, kernels that can be launched so are; it needs compute capability 9.0."""
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)


def pdl_arguments() -> dict[str, bool]:
    """Arguments of a launch: PDL of the kernel, and if it is on, the launcher's option."""
    return {"PDL": True, "launch_pdl": True} if _on.get() else {"PDL": False}
