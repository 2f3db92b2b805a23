"""Whether compiled kernels of this process run in the emulator, on CPU tensors and without a GPU.

An environment variable says so, as for Triton's interpreter. The registry reads it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "ROOFLAB_EMULATE"


def emulating() -> bool:
    """Whether every launch is emulated now."""
    return os.environ.get(VARIABLE) == "1"


@contextmanager
def emulation() -> Iterator[None]:
    """Sets the variable inside the `with` block; the caller redirects the launches (`emulate/ours.py`)."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
