"""torch.compile (`kernels/_peers.py`).  Liger takes gate and up as two tensors with rows one after another."""

from __future__ import annotations

import torch

from rooflab.kernels._peers import compiled, peer
from rooflab.kernels.silu_and_mul._traffic import traffic


def formula(x: torch.Tensor) -> torch.Tensor:
    """The op as torch.compile sees it."""
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


peer("silu_and_mul", "compiled", compiled(formula), traffic, lacks=("quantize",))
