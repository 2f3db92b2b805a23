"""What Gluon calls by another name since Triton 3.9, by one name here."""

from __future__ import annotations

from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""From global to shared memory; an mbarrier counts the bytes."""
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""From shared to global memory; `tma.store_wait` waits."""
reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
"""The same shared memory with another dtype, shape and layout."""
