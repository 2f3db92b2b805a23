"""The kernel `naive` gathers the angles, then rotates q and k as a model's source code does, with one call per step."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Rotates q and k in fp32, step by step.  A position outside the tables raises torch's error."""
    D = q.shape[2]
    first_columns = slice(0, D, 2) if interleaved else slice(0, D // 2)
    second_columns = slice(1, D, 2) if interleaved else slice(D // 2, D)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # (T, 1, D/2)
    for x, result in ((q, q_out), (k, k_out)):
        x32 = x.float()
        x1, x2 = x32[..., first_columns], x32[..., second_columns]
        rotated_pair = x1 * c - x2 * s, x2 * c + x1 * s  # both before a store: the result may be x itself
        result[..., first_columns], result[..., second_columns] = rotated_pair
