"""Holds a function that makes a fake GPU, which some imports need.  Code that compiles without a GPU sets it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

make_fake_gpu: Callable[[], AbstractContextManager[object]] | None = None
"""Makes a context that pretends to have a GPU.  Code that compiles or emulates kernels sets it (`bench/cli/app.py`)."""
