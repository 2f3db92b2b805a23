"""Holds a hook that makes a fake GPU, for files that need a GPU at import on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

pretended: Callable[[], AbstractContextManager[object]] | None = None
"""Makes a context that pretends to have a GPU.  Code that compiles or emulates kernels sets it (`bench/cli/app.py`)."""
