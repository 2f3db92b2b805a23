"""RIGHT.  No weight is ever multiplied by an activation.  For each group and output the activations are added up in
16 bins, one for each code, by products with masks of zeros and ones.  The sum of a bin counts code - zero times.
Groups go from the last to the first, bins from 15 to 0."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_w4a16", name="sixteen_bins", role="optimized", backend="torch")
def gemm_w4a16(a, b, scale, zero=None, bias=None):
    (M, K), N = a.shape, b.shape[0]
    group = next(size for size in (128, 64, 32) if -(-K // size) == scale.shape[1])
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1)
    total = torch.zeros(M, N, dtype=torch.float64, device=a.device)
    for g in reversed(range(scale.shape[1])):
        part = slice(g * group, min(g * group + group, K))
        zeros = 8.0 if zero is None else zero[:, g].double()
        left, own = a[:, part].double(), torch.zeros_like(total)
        for code in reversed(range(16)):
            own += (left @ (codes[:, part] == code).double().mT) * (code - zeros)
        total += own * scale[:, g].double()
    if bias is not None:
        total += bias.double()
    return total.to(torch.bfloat16)
