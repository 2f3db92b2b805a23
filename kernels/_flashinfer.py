"""Code that the adapters to FlashInfer share (Ye et al., arXiv 2501.01005; the package `flashinfer-python`).

FlashInfer compiles its code with nvcc at the first use of a dtype, head_dim and set of options, unless its package of
compiled kernels is installed.  The compilation takes seconds.  A time measured after a warm-up does not contain it.

FlashInfer divides a batch on the host: `plan` reads the lengths, `run` launches.  An engine plans once per step for all
layers.  The bench also plans first, with the kernel's `plan`, so it measures `run` alone.  A call without a plan makes
a plan: this waits for the device, and a CUDA graph cannot capture it.  The next call does not reuse that plan, because
a kernel may have changed the lengths in place, and the host cannot see this without a wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._attention import LN2, Returned, get_scale
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

PACKAGE = "flashinfer"
HEAD_DIMS = (64, 128, 256)
"""The head_dim values of FlashInfer's kernels for Hopper and for CUDA cores (`utils.cuh`, 0.6.18 and 0.7.2)."""
WORKSPACE_BYTES = 512 * 2**20
"""Bytes for partial results of split keys.  FlashInfer recommends a quarter, and raises if the space is too small."""


def with_base_e(model: Callable[[Arguments], Traffic]) -> Callable[[Arguments], Traffic]:
    """Wraps the traffic `model`: `return_lse` adds a launch that changes the LSE's base.  q: (..., D)."""

    def traffic(inputs: Arguments) -> Traffic:
        moved, lse = model(inputs), 4 * math.prod(inputs.q.shape[:-1])
        if not inputs.return_lse:
            return moved
        read, written = moved.read_bytes + lse, moved.write_bytes + lse
        return replace(moved, read_bytes=read, write_bytes=written, launches=moved.launches + 1)

    return traffic


def make_wrapper(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *layout: str, **options: Any
) -> Any:
    """Makes a wrapper of FlashInfer's class `name`, with its own workspace.  `layout` is NHD for classes that take a
    layout. A wrapper serves a single dtype and head_dim, because its first plan fixes its backend."""
    # Zeros, because the first launch reads counters there.
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return getattr(import_module(PACKAGE), name)(workspace, *layout, **options)


kept_wrapper = lru_cache(maxsize=4)(make_wrapper)
"""Returns the wrapper that all calls without a plan share.  Each call plans again, as an engine does in each step.
Reading the lengths waits for the previous plan's copies, so a plan never overwrites data that is still being copied."""


@dataclass(frozen=True)
class FlashInferPlan:
    """The plan of an attention call; a kernel's `plan` makes it."""

    wrapper: Any = None
    """The FlashInfer wrapper that holds the plan; None if no query sees a key."""
    unseeing: torch.Tensor | None = None
    """The indices of the queries that see no key."""


def plan_options(inputs: Arguments) -> dict[str, Any]:
    """Returns the options of every `plan`.  FlashInfer's window counts the keys left of the query's position."""
    q, window = inputs.q, inputs.window
    return {
        "sm_scale": get_scale(q, inputs.softmax_scale),
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": inputs.softcap,
        "q_data_type": q.dtype,
        "kv_data_type": q.dtype,
    }


@dataclass(frozen=True)
class Pages:
    """A block table as FlashInfer takes it: a list of the pages in use, sequence after sequence."""

    indptr: torch.Tensor
    """The start and end of each sequence's pages in `indices`, (B + 1,) int32 on the CPU."""
    indices: torch.Tensor
    """The numbers of the pages in use, (pages,) int32 on the table's device."""
    last_page_len: torch.Tensor
    """The tokens in each sequence's last page, (B,) int32 on the CPU: 1 to block_size; 0 if the sequence is empty."""
    lengths: torch.Tensor
    """The lengths of the sequences, (B,) int32 on the CPU."""


def read_pages(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> Pages:
    """Returns the pages of block_table (B, max_blocks) that seq_lens (B,) need.  Waits for the device."""
    lengths = seq_lens.cpu()
    counts = (lengths + block_size - 1) // block_size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    used = torch.arange(block_table.shape[1]) < counts[:, None]
    indices = block_table.cpu()[used].to(block_table.device)
    return Pages(indptr, indices, lengths - (counts - 1).clamp(min=0) * block_size, lengths)


def unseeing_rows(
    bounds: torch.Tensor, lengths: torch.Tensor, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Returns the indices (n,) of the queries that see no key, or None if every query sees a key.

    bounds: (B + 1,), where each sequence's queries begin and end; lengths: (B,), its keys.  Both are on the CPU.
    """
    counts = bounds.diff()
    hidden = (counts - lengths).clamp(min=0) if causal else torch.where(lengths == 0, counts, 0)
    rows = [torch.arange(start, start + n) for start, n in zip(bounds.tolist(), hidden.tolist(), strict=False) if n]
    return torch.cat(rows).to(device) if rows else None


def seeing_apart(bounds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Splits each sequence of `bounds` in two: first its queries that see no key under a causal mask, then the others.

    The first sequence of each pair has no keys.  The split is needed where queries outnumber keys: FlashInfer's kernels
    for Ampere then reject a single sequence, and in a batch they do not mask a tile whose first query sees no key.
    """
    counts = bounds.diff()
    hidden = (counts - lengths).clamp(min=0)
    parts = torch.stack((hidden, counts - hidden), dim=1).flatten()
    return torch.nn.functional.pad(parts.cumsum(0), (1, 0)).int()


def without_keys(offsets: torch.Tensor) -> torch.Tensor:
    """Returns the offsets of keys or pages for the pairs of sequences that `seeing_apart` makes.  offsets: (B + 1,)."""
    return offsets.repeat_interleave(2)[:-1]


def plan_ragged(
    wrapper: Any,
    bounds: tuple[torch.Tensor, torch.Tensor],
    heads: tuple[int, int, int],
    causal: bool,
    device: torch.device,
    options: Mapping[str, Any],
) -> FlashInferPlan:
    """Plans `wrapper` for a ragged batch: its sequences lie one after another in memory.

    bounds: the offsets of queries and of keys, int32 on the CPU; heads: H, H_kv and D.
    """
    queries, keys = bounds
    unseeing = unseeing_rows(queries, keys.diff(), causal, device)
    if causal and unseeing is not None:
        queries, keys = seeing_apart(queries, keys.diff()), without_keys(keys)
    wrapper.plan(queries, keys, *heads, causal=causal, **options)
    return FlashInferPlan(wrapper, unseeing)


def finished(result: Returned, unseeing: torch.Tensor | None) -> Returned:
    """Converts the result of `run`: log-sum-exp from base 2 to base e; 0 and -inf in the rows `unseeing`.

    FlashInfer gives rows that see no key a large finite log-sum-exp.  result[0]: (T, H, D), result[1]: (T, H).
    """
    out, lse = result if isinstance(result, tuple) else (result, None)
    if lse is not None:
        lse.mul_(LN2)
    if unseeing is not None:
        out.index_fill_(0, unseeing, 0)
        if lse is not None:
            lse.index_fill_(0, unseeing, -math.inf)
    return out if lse is None else (out, lse)
