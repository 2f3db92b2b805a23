"""For the CPU, in C++: each new token is normed, rotated and written in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rooflab.kernels._native import DTYPES, Layouts, built, sizes
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rope_and_cache._operands import check_operands
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

SOURCE = Path(__file__).with_suffix(".cpp")
_layouts = Layouts()


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, and a row of both tables for each token; what has no slot is not read."""
    q, k, slots = inputs.q, inputs.k, inputs.slot_mapping
    kept = int((slots >= 0).sum()) * k.shape[1] * k.shape[2] * k.element_size()
    tables = 2 * len(slots) * inputs.cos.shape[1] * 4
    read = nbytes(q, inputs.positions, slots, inputs.q_norm, inputs.k_norm) + 2 * kept + tables
    return Traffic(read, nbytes(q) + 2 * kept)


@register(op="rope_and_cache", name="native", role="optimized", backend="cpp", devices=("cpu",), traffic=traffic)
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> None:
    """Rotates q into q_out and writes the rotated k, and v, to their slots; skips a negative slot.

    q: (T, H, D); k, v: (T, H_kv, D); cos, sin: (max_position, R/2) fp32, R <= D; positions, slot_mapping: (T,) int64;
    k_cache, v_cache: (num_blocks, block_size, H_kv, D); q_norm, k_norm: (D,), the weights of norms of each head before
    its rotation.  Raises `ValueError` on wrong shapes or dtypes, and on a position outside the tables or a slot outside
    the caches.
    """
    tensors = (q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, q_norm, k_norm)
    shape = _layouts.of(_shape, tensors, interleaved)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    bad = built(SOURCE, "ipppppppppppppf")(DTYPES[q.dtype], *pointers, shape, norm_eps)
    if bad:
        name, values, most = (
            ("positions", positions, len(cos) - 1),
            ("slot_mapping", slot_mapping, k_cache.shape[0] * k_cache.shape[1] - 1),
        )[bad - 1]
        raise ValueError(f"{name}: expected at most {most}, got {values.tolist()}")


def _shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    interleaved: bool,
) -> Any:
    tensors = (q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping)
    T, H, H_kv, D, R = check_operands(*tensors, None, None, q_norm, k_norm)
    strides = (stride for x in (q, k, v, q_out) for stride in x.stride()[:2])
    slots = k_cache.shape[0] * k_cache.shape[1]
    ends = (cos.stride(0), sin.stride(0), interleaved, torch.get_num_threads())
    return sizes(T, H, H_kv, D, R // 2, len(cos), slots, *strides, *ends)
