"""CUDA C++ that `paged_attention/split_kv` begins with."""

BARRIERS = '#include "hopper.h"\n'
"""Barriers in shared memory, by their addresses."""
