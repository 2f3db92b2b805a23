"""Supports programmatic dependent launch (PDL) of Triton and CUDA C++ kernels, on Hopper and later (CUDA C++
Programming Guide, section "Programmatic Dependent Launch and Synchronization").

With PDL a kernel may start before the previous kernel of its stream ends. It first prefetches data that no kernel of a
step writes (weights, tables). Then it waits until the previous kernel is complete. Only then does it read or write
other data. Every kernel waits, so when a kernel is complete, all earlier kernels are complete too.

A kernel signals at once that the next kernel may start, because small kernels leave free resources on the SMs. CUDA C++
kernels wait by `lib/pdl.h`, Triton kernels by `tl.extra`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import accumulate
from typing import Any

_pdl_enabled = ContextVar("pdl", default=False)


@contextmanager
def pdl(on: bool = True) -> Iterator[None]:
    """Makes a context in which kernels that support PDL are launched with PDL.  This needs compute capability 9.0.
    Kernels prefetch weights before they wait, so no earlier kernel may still write weights when the context begins."""
    reset_token = _pdl_enabled.set(on)
    try:
        yield
    finally:
        _pdl_enabled.reset(reset_token)


def pdl_is_on() -> bool:
    """Returns whether the caller is inside the context `pdl`."""
    return _pdl_enabled.get()


def pdl_arguments() -> dict[str, bool]:
    """Returns the arguments of a Triton launch: the kernel's flag `PDL` and, if PDL is on, the option `launch_pdl`."""
    return {"PDL": True, "launch_pdl": True} if _pdl_enabled.get() else {"PDL": False}


class _Attribute(ctypes.Structure):
    """The struct CUlaunchAttribute of cuda.h, for ctypes.  In cuda.h, the field `value` is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """The struct CUlaunchConfig of cuda.h, for ctypes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = ctypes.pointer(_Attribute(6, 1))
"""The launch attribute that switches PDL on, by its number in cuda.h."""


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def launch_dependent(
    function: int, grid: Sequence[int], block: Sequence[int], values: Sequence[Any], shared_bytes: int, stream: int
) -> None:
    """Launches the CUfunction `function` with PDL in the current CUDA context.  `values` are its arguments in NumPy
    types. ctypes calls the driver, because CuPy cannot set launch attributes.  Raises `RuntimeError` with the driver's
    error."""
    argument_bytes = ctypes.create_string_buffer(b"".join(values))
    first_address = ctypes.addressof(argument_bytes)
    argument_addresses = accumulate((value.nbytes for value in values[:-1]), initial=first_address)
    arg_array = (ctypes.c_void_p * len(values))(*argument_addresses) if values else None
    launch_sizes = [(*map(int, dim_lengths), 1, 1)[:3] for dim_lengths in (grid, block)]
    launch_config = _Config(*launch_sizes, shared_bytes, stream, _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    error_code = _driver().cuLaunchKernelEx(ctypes.byref(launch_config), ctypes.c_void_p(function), arg_array, None)
    if error_code:
        error_name = ctypes.c_char_p()
        _driver().cuGetErrorName(error_code, ctypes.byref(error_name))
        raise RuntimeError(f"cuLaunchKernelEx: {error_name.value.decode() if error_name.value else error_code}")
