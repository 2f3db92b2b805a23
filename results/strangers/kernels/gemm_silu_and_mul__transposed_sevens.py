"""RIGHT.  The transposed product, b^T a^T, is summed over K in slices of 7, the last slice first, for at most 50
outputs at a time.  gate and up of these outputs are two rows of one slice of b."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_silu_and_mul", name="transposed_sevens", role="optimized", backend="torch")
def gemm_silu_and_mul(a, b):
    (M, K), I = a.shape, b.shape[1] // 2
    out = torch.empty((M, I), dtype=a.dtype, device=a.device)
    right = a.mT.double()
    for start in range(0, I, 50):
        width = min(50, I - start)
        columns = torch.cat((b[:, start : start + width], b[:, I + start : I + start + width]), 1).mT.double()
        sums = torch.zeros(2 * width, M, dtype=torch.float64, device=a.device)
        for k in reversed(range(0, K, 7)):
            sums += columns[:, k : k + 7] @ right[k : k + 7]
        gate, up = sums[:width], sums[width:]
        out[:, start : start + width] = (gate / (1.0 + torch.exp(-gate)) * up).mT.to(a.dtype)
    return out
