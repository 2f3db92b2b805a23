"""Provides code that all adapters to FlashInfer share (Ye et al., arXiv 2501.01005; the package `flashinfer-python`).

FlashInfer compiles its code with nvcc when a dtype, a head_dim or an option is new. This takes seconds, unless its
package of compiled kernels is installed. A time measured after a warm-up does not contain it.

FlashInfer divides the work of a batch on the host: `plan` reads the lengths, and `run` launches the kernel. An engine
calls `plan` once per step for all layers, and the benchmark measures `run` alone. A call without a plan makes its own
and waits for the device, so a CUDA graph cannot capture it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._attention import LN2, AttentionResult, get_scale
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

PACKAGE = "flashinfer"
HEAD_DIMS = (64, 128, 256)
"""The head_dim values of FlashInfer's kernels for Hopper and for CUDA cores (`utils.cuh`, 0.6.18 and 0.7.2)."""
WORKSPACE_BYTES = 512 * 2**20
"""Bytes for partial results of split keys.  FlashInfer recommends a quarter, and raises if the space is too small."""


def with_base_e(model: Callable[[Arguments], Traffic]) -> Callable[[Arguments], Traffic]:
    """Wraps `model`, which counts the memory traffic of FlashInfer's attention with queries `[..., D]`.  FlashInfer's
    log-sum-exp has base 2.  With `return_lse`, another launch changes it to base e.  The wrapper adds this launch's
    traffic."""

    def traffic(inputs: Arguments) -> Traffic:
        base_traffic, lse_bytes = model(inputs), 4 * math.prod(inputs.q.shape[:-1])
        if not inputs.return_lse:
            return base_traffic
        read_bytes, write_bytes = base_traffic.read_bytes + lse_bytes, base_traffic.write_bytes + lse_bytes
        return replace(base_traffic, read_bytes=read_bytes, write_bytes=write_bytes, launches=base_traffic.launches + 1)

    return traffic


def make_wrapper(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *layout: str, **options: Any
) -> Any:
    """Makes an object of FlashInfer's class `name`, with its own workspace.  If the class takes a layout, `layout` is
    `NHD`.  An object serves one dtype and head_dim: its first plan fixes its backend.
    """
    # Zeros, because the first launch reads counters there.
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return getattr(import_module(PACKAGE), name)(workspace, *layout, **options)


kept_wrapper = lru_cache(maxsize=4)(make_wrapper)
"""Returns the wrapper that all calls without a plan share.  Each call plans again, as an engine does in each step.
Reading the lengths waits for the previous plan's copies, so a plan never overwrites data that is still being copied."""


@dataclass(frozen=True)
class FlashInferPlan:
    """The plan of a FlashInfer attention call: how the work is divided, and which queries see no key."""

    wrapper: Any = None
    """The FlashInfer wrapper that holds the plan; None if no query sees a key."""
    unseeing: torch.Tensor | None = None
    """The indices of the queries that see no key."""


def plan_options(inputs: Arguments) -> dict[str, Any]:
    """Returns the options of every `plan` call.  `window_left` does not count the query's own key: `window - 1`."""
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
    """The pages of a block table in FlashInfer's format: one list of the used pages, ordered by sequence."""

    indptr: torch.Tensor
    """The start and end of each sequence's pages in `indices`, (B + 1,) int32 on the CPU."""
    indices: torch.Tensor
    """The numbers of the pages in use, (pages,) int32 on the table's device."""
    last_page_len: torch.Tensor
    """The tokens in each sequence's last page, (B,) int32 on the CPU: 1 to block_size; 0 if the sequence is empty."""
    lengths: torch.Tensor
    """The lengths of the sequences, (B,) int32 on the CPU."""


def read_pages(block_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> Pages:
    """Returns the used pages of a block table `[B, max_blocks]` for sequence lengths `[B]`.  Waits for the device."""
    lengths = seq_lens.cpu()
    page_counts = (lengths + block_size - 1) // block_size
    indptr = torch.nn.functional.pad(page_counts.cumsum(0), (1, 0)).int()
    is_used_page = torch.arange(block_table.shape[1]) < page_counts[:, None]
    indices = block_table.cpu()[is_used_page].to(block_table.device)
    return Pages(indptr, indices, lengths - (page_counts - 1).clamp(min=0) * block_size, lengths)


def unseeing_rows(
    bounds: torch.Tensor, lengths: torch.Tensor, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Returns the indices `[n]` of the queries that see no key, or None if every query sees a key.

    Both tensors are on the CPU.  `bounds` `[B + 1]` has the offsets of each sequence's queries.  `lengths` `[B]` has
    the numbers of keys."""
    query_counts = bounds.diff()
    no_key_counts = (query_counts - lengths).clamp(min=0) if causal else torch.where(lengths == 0, query_counts, 0)
    rows = [torch.arange(row, row + n) for row, n in zip(bounds.tolist(), no_key_counts.tolist(), strict=False) if n]
    return torch.cat(rows).to(device) if rows else None


def seeing_apart(bounds: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Splits each sequence in two: queries that see no key, then the other queries. Returns the new offsets.

    `bounds` has the offsets of each sequence's queries, and `lengths` its numbers of keys. Under a causal mask, the
    first queries of a sequence with more queries than keys see no key. FlashInfer rejects such a sequence on Ampere, or
    computes it without the right mask in a larger batch."""
    query_counts = bounds.diff()
    no_key_counts = (query_counts - lengths).clamp(min=0)
    part_sizes = torch.stack((no_key_counts, query_counts - no_key_counts), dim=1).flatten()
    return torch.nn.functional.pad(part_sizes.cumsum(0), (1, 0)).int()


def without_keys(offsets: torch.Tensor) -> torch.Tensor:
    """Adapts the offsets of keys or pages `[B + 1]` to sequences that were split in two parts. The first part has the
    queries that see no key, so it gets no keys. The second part gets all keys. Returns the new offsets `[2 * B +
    1]`."""
    return offsets.repeat_interleave(2)[:-1]


def plan_ragged(
    wrapper: Any,
    bounds: tuple[torch.Tensor, torch.Tensor],
    heads: tuple[int, int, int],
    causal: bool,
    device: torch.device,
    options: Mapping[str, Any],
) -> FlashInferPlan:
    """Calls `wrapper.plan` for sequences of different lengths, and returns the plan.  `bounds` is two int32 tensors on
    the CPU: the offsets of each sequence's queries, and of its keys.  `heads` is `(H, H_kv, D)`."""
    query_bounds, key_bounds = bounds
    no_key_rows = unseeing_rows(query_bounds, key_bounds.diff(), causal, device)
    if causal and no_key_rows is not None:
        query_bounds, key_bounds = seeing_apart(query_bounds, key_bounds.diff()), without_keys(key_bounds)
    wrapper.plan(query_bounds, key_bounds, *heads, causal=causal, **options)
    return FlashInferPlan(wrapper, no_key_rows)


def finished(result: AttentionResult, unseeing: torch.Tensor | None) -> AttentionResult:
    """Corrects FlashInfer's result in place: the output `[T, H, D]` and, if given, the log-sum-exp `[T, H]`.

    The log-sum-exp changes from base 2 to base e. `unseeing` lists the queries that see no key. Their output becomes 0,
    and their log-sum-exp, in FlashInfer a large finite number, becomes -inf."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    if lse is not None:
        lse.mul_(LN2)
    if unseeing is not None:
        out.index_fill_(0, unseeing, 0)
        if lse is not None:
            lse.index_fill_(0, unseeing, -math.inf)
    return out if lse is None else (out, lse)
