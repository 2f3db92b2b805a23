"""WRONG.  The angles are computed from the positions with theta = 10000, and the tables are not read.  For the
tables of a plain Llama that is the same.  A model with another theta, or with scaled frequencies (Llama 3.1, YaRN),
passes other tables, and all its rotations are off."""

import torch

from rooflab.kernels.registry import register


@register(op="rope", name="own_angles", role="optimized", backend="torch")
def rope(q, k, cos, sin, positions, interleaved=False):
    half = q.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float64, device=q.device)
    angles = positions.double()[:, None, None] * 10000.0 ** (-steps / max(half, 1))
    c, s = angles.cos(), angles.sin()
    results = []
    for x in (q, k):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        one, two = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
        first, second = x[..., one].double(), x[..., two].double()
        out[..., one] = first * c - second * s
        out[..., two] = second * c + first * s
        results.append(out)
    return tuple(results)
