"""The kernel `native`, in C++ for the CPU, makes one pass per new token: norm, rotation, and the write of k and v."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.launcher import kernel
from rooflab.reference.rope_and_cache import SPEC
from rooflab.reference.spec import Arguments

SOURCE = Path(__file__).with_suffix(".cpp")


def shape(of: Arguments) -> Any:
    """Returns the sizes, strides and number of threads for a layout."""
    (T, H, D), H_kv, (max_position, half_dim) = of.q.shape, of.k.shape[1], of.cos.shape
    strides = (stride for x in (of.q, of.k, of.v, of.q_out) for stride in x.stride()[:2])
    num_slots = of.k_cache.shape[0] * of.k_cache.shape[1]
    option_values = (of.cos.stride(0), of.sin.stride(0), of.interleaved, torch.get_num_threads())
    return sizes(T, H, H_kv, D, half_dim, max_position, num_slots, *strides, *option_values)


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=SPEC.least,
    bind=shape,
    over="naive",
    shows={"": ('calls("naive").total >= 20 and calls("native").names.keys() <= {"empty", "empty_like"}')},
)
def native(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, q_out: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, *,
    interleaved: bool, q_norm: Tensor | None, k_norm: Tensor | None, norm_eps: float, bound: Any,
) -> None:  # fmt: skip
    """Normalizes and rotates q and k, and writes k and v; skips negative slots.  Raises `ValueError` on a wrong
    position or too large a slot."""
    tensors = (q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, q_norm, k_norm)
    tensor_pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    error_code = built(SOURCE, "ipppppppppppppf")(DTYPE_CODES[q.dtype], *tensor_pointers, bound, norm_eps)
    if error_code:
        name, values, max_value = (
            ("positions", positions, len(cos) - 1),
            ("slot_mapping", slot_mapping, k_cache.shape[0] * k_cache.shape[1] - 1),
        )[error_code - 1]
        raise ValueError(f"{name}: expected at most {max_value}, got {values.tolist()}")
