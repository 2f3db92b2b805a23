"""What the adapters to FlashInfer share (Ye et al., arXiv 2501.01005; the package `flashinfer-python`).

It compiles its code for each dtype, head_dim and set of options on their first use, with nvcc, where no package of
compiled ones is beside it: seconds that no time taken after a warm-up has.

FlashInfer divides a batch on the host: `plan` reads the lengths, `run` launches.  An engine plans once for all layers
of a step, and so does the bench, by the kernel's `plan`: what it times is `run`.  A call that is given no plan makes
one: it waits for the device and cannot be captured in a graph.  It keeps none for the next call, because what changes
lengths in place, as a kernel does, leaves no trace that a call could see without waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._attention import LN2, Returned, get_scale
from rooflab.kernels._tma import ALIGNMENT, address_of
from rooflab.roofline.model import Traffic

PACKAGE = "flashinfer"
HEAD_DIMS = (64, 128, 256)
"""Of its kernels for Hopper and of those for CUDA cores (`utils.cuh`, 0.6.18 and 0.7.2)."""
WORKSPACE_BYTES = 512 * 2**20
"""For parts of a result where keys are split: it recommends a quarter of this, and raises where that is too little."""


def why_not(tensors: Mapping[str, torch.Tensor], head_dims: tuple[int, ...] = HEAD_DIMS) -> str | None:
    """Why FlashInfer cannot take `tensors`, q first, then keys and values: dtype, head_dim, strides, addresses."""
    name, q = next(iter(tensors.items()))
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{name}: expected torch.float16 or torch.bfloat16, got {q.dtype}"
    if q.shape[-1] not in head_dims:
        return f"{name}: expected a head_dim of {' or '.join(map(str, head_dims))}, got {q.shape[-1]}"
    for name, tensor in tensors.items():
        address = address_of(tensor) % ALIGNMENT
        steps = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1]
        if tensor.numel() and (address or any(step * tensor.element_size() % ALIGNMENT for step in steps)):
            return (
                f"{name}: expected an address and strides of whole {ALIGNMENT} bytes, got address % {ALIGNMENT} = "
                f"{address} and strides {tensor.stride()}"
            )
    if len(tensors) == 3:
        (_, _), (key, k), (value, v) = tensors.items()
        if k.numel() and k.stride() != v.stride():
            return f"{value}: expected the strides of {key}, {k.stride()}, got {v.stride()}"
    return None


def with_base_e(traffic: Traffic, q: torch.Tensor, return_lse: bool) -> Traffic:
    """`traffic`, and with `return_lse` the change of base of a log-sum-exp for q (..., D)."""
    if not return_lse:
        return traffic
    lse = 4 * math.prod(q.shape[:-1])
    return replace(
        traffic,
        read_bytes=traffic.read_bytes + lse,
        write_bytes=traffic.write_bytes + lse,
        launches=traffic.launches + 1,
    )


def make_wrapper(name: str, device: torch.device, *layout: str, **options: Any) -> Any:
    """A new wrapper of this class, with a workspace of its own; `layout` is NHD where the class takes one."""
    # Zeros, because the first launch takes counters in it for such.
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return getattr(import_module(PACKAGE), name)(workspace, *layout, **options)


@lru_cache(maxsize=4)
def kept_wrapper(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *layout: str, **options: Any
) -> Any:
    """One wrapper for all calls without a plan, which each plans anew, as an engine does in each step.

    By dtype and head_dim too: a wrapper's first plan settles its backend. The host's reading of the lengths waits for
    the copies that the last plan has queued, so that a plan never overwrites what is still being copied.
    """
    return make_wrapper(name, device, *layout, **options)


@dataclass(frozen=True)
class Plan:
    """What a call runs."""

    wrapper: Any
    """Planned; None where no query sees a key."""
    unseeing: torch.Tensor | None
    """The queries that see none."""


def wrapper_for(
    kept: bool, name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *layout: str, **options: Any
) -> Any:
    """The wrapper of calls without a plan, or a new one for a plan that lives as long as its owner wants."""
    if kept:
        return kept_wrapper(name, device, dtype, head_dim, *layout, **options)
    return make_wrapper(name, device, *layout, **options)


def plan_options(
    q: torch.Tensor, softmax_scale: float | None, window: int | None, softcap: float | None
) -> dict[str, Any]:
    """What every `plan` is told of the maths; FlashInfer's window counts the keys to the left of a query's own."""
    return {
        "sm_scale": get_scale(q, softmax_scale),
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": softcap,
        "q_data_type": q.dtype,
        "kv_data_type": q.dtype,
    }


@dataclass(frozen=True)
class Pages:
    """A block table in FlashInfer's form: the pages in use, one sequence's after another's."""

    indptr: torch.Tensor
    """(B + 1,) int32 on the CPU: where each sequence's pages begin and end in `indices`."""
    indices: torch.Tensor
    """(pages,) int32 on the table's device."""
    last_page_len: torch.Tensor
    """(B,) int32 on the CPU: 1 to block_size, and 0 for an empty sequence."""
    lengths: torch.Tensor
    """(B,) int32 on the CPU."""


def read_pages(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> Pages:
    """The pages of block_table (B, max_blocks) that seq_lens (B,) need; waits for the device."""
    lengths = seq_lens.cpu()
    counts = (lengths + block_size - 1) // block_size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    used = torch.arange(block_table.shape[1]) < counts[:, None]
    indices = block_table.cpu()[used].to(block_table.device)
    return Pages(indptr, indices, lengths - (counts - 1).clamp(min=0) * block_size, lengths)


def unseeing_rows(
    bounds: torch.Tensor, lengths: torch.Tensor, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """The queries (n,) that see no key, or None where all see one.

    bounds: (B + 1,), each sequence's queries; lengths: (B,), its keys; both on the CPU.
    """
    counts = bounds.diff()
    hidden = (counts - lengths).clamp(min=0) if causal else torch.where(lengths == 0, counts, 0)
    rows = [torch.arange(start, start + n) for start, n in zip(bounds.tolist(), hidden.tolist(), strict=False) if n]
    return torch.cat(rows).to(device) if rows else None


def seeing_apart(bounds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`bounds` with two sequences for each, the first of the queries that see no key under a causal mask.

    Where there are more queries than keys, FlashInfer's kernels for Ampere refuse a single sequence, and leave out the
    mask of a batch's tile that begins with such a query.  So each sequence becomes two, of which one has no keys.
    """
    counts = bounds.diff()
    hidden = (counts - lengths).clamp(min=0)
    parts = torch.stack((hidden, counts - hidden), dim=1).flatten()
    return torch.nn.functional.pad(parts.cumsum(0), (1, 0)).int()


def without_keys(offsets: torch.Tensor) -> torch.Tensor:
    """Offsets of keys or pages (B + 1,) for the sequences of `seeing_apart`."""
    return offsets.repeat_interleave(2)[:-1]


def plan_ragged(
    wrapper: Any,
    bounds: tuple[torch.Tensor, torch.Tensor],
    heads: tuple[int, int, int],
    causal: bool,
    device: torch.device,
    options: Mapping[str, Any],
) -> Plan:
    """A plan of `wrapper` for sequences one after another; bounds: of queries and keys, int32 on the CPU; heads: H,
    H_kv and D."""
    queries, keys = bounds
    unseeing = unseeing_rows(queries, keys.diff(), causal, device)
    if causal and unseeing is not None:
        queries, keys = seeing_apart(queries, keys.diff()), without_keys(keys)
    wrapper.plan(queries, keys, *heads, causal=causal, **options)
    return Plan(wrapper, unseeing)


def finished(found: Returned, unseeing: torch.Tensor | None) -> Returned:
    """What `run` returned, with the log-sum-exp natural, where FlashInfer's is of base 2, and 0 and -inf in rows that
    see no key, for which it has a large finite number; found[0]: (T, H, D), found[1]: (T, H)."""
    out, lse = found if isinstance(found, tuple) else (found, None)
    if lse is not None:
        lse.mul_(LN2)
    if unseeing is not None:
        out.index_fill_(0, unseeing, 0)
        if lse is not None:
            lse.index_fill_(0, unseeing, -math.inf)
    return out if lse is None else (out, lse)
