"""The kernel `joined` improves on `naive`: it concatenates q and k along the heads, so each step is one call for both.

The kernel is for the CPU, where the torch calls of a decode step take more time than the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(
    backend="torch",
    over="naive",
    shows={
        "": (
            'calls("joined").total < calls("naive").total; '
            'calls("joined").names["cat"] + calls("joined").names["stack"] >= 2 and calls("joined").names["index"] == 2'
        )
    },
)
def joined(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotates q and k in fp32, as two views of one tensor.  A position outside the tables raises torch's error."""
    return turned(q, k, cos, sin, positions, interleaved)


def turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Returns q and k rotated by the angles of their positions."""
    H = q.shape[1]
    cosines = cos[positions].unsqueeze(1)  # (T, 1, D/2)
    sines = sin[positions].unsqueeze(1)
    x = torch.cat((q, k), dim=1).float()  # (T, H + H_kv, D)
    if interleaved:
        x1, x2 = x[..., 0::2], x[..., 1::2]
    else:
        x1, x2 = x.chunk(2, dim=-1)
    rotated_halves = (torch.addcmul(x1 * cosines, x2, sines, value=-1), torch.addcmul(x2 * cosines, x1, sines))
    rotated_qk = torch.stack(rotated_halves, dim=-1).flatten(-2) if interleaved else torch.cat(rotated_halves, dim=-1)
    rotated_qk = rotated_qk.to(q.dtype)
    return rotated_qk[:, :H], rotated_qk[:, H:]
