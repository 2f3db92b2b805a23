"""The kernel `naive` normalizes and rotates q and k step by step.  An index assignment then writes to each cache."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, q_out: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, *,
    interleaved: bool, k_scale: Tensor | None, v_scale: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    norm_eps: float,
) -> None:  # fmt: skip
    """Normalizes and rotates q and k, and writes k and v; skips a negative slot.  A wrong position raises an error."""
    R = 2 * cos.shape[1]
    first_columns = slice(0, R, 2) if interleaved else slice(0, R // 2)
    second_columns = slice(1, R, 2) if interleaved else slice(R // 2, R)
    cosines, sines = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # (T, 1, R/2)
    rotated_heads = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        x32 = x.float()
        if weight is not None:
            x32 = x32 * (x32.square().mean(dim=-1, keepdim=True) + norm_eps).rsqrt() * weight.float()
        result = x32.clone()
        result[..., first_columns] = x32[..., first_columns] * cosines - x32[..., second_columns] * sines
        result[..., second_columns] = x32[..., second_columns] * cosines + x32[..., first_columns] * sines
        rotated_heads.append(result)
    q_out.copy_(rotated_heads[0])
    has_slot = slot_mapping >= 0
    slots = slot_mapping[has_slot]
    for cache, new_values, scale in ((k_cache, rotated_heads[1], k_scale), (v_cache, v.float(), v_scale)):
        if scale is not None:
            max_value = torch.finfo(cache.dtype).max
            new_values = (new_values / scale[:, None]).clamp(-max_value, max_value)
        cache.view(-1, *cache.shape[2:])[slots] = new_values.to(cache.dtype)[has_slot]
