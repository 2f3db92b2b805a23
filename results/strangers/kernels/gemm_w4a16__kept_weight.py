"""WRONG.  The dequantised weight is kept for later calls under the addresses of the codes and scales.  When the
weights are loaded again into the same memory (a new checkpoint in RLHF, a swapped adapter), the old weight is used
for ever."""

import torch

from rooflab.kernels.registry import register

kept = {}


@register(op="gemm_w4a16", name="kept_weight", role="optimized", backend="torch")
def gemm_w4a16(a, b, scale, zero=None, bias=None):
    K = a.shape[1]
    key = (b.data_ptr(), scale.data_ptr(), None if zero is None else zero.data_ptr(), tuple(b.shape), b.stride())
    if key not in kept:
        if len(kept) > 64:
            kept.clear()
        group = next(size for size in (128, 64, 32) if -(-K // size) == scale.shape[1])
        codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1).float()
        offsets = 8.0 if zero is None else zero.float().repeat_interleave(group, 1)[:, :K]
        kept[key] = (codes - offsets) * scale.float().repeat_interleave(group, 1)[:, :K]
    product = a.float() @ kept[key].mT
    if bias is not None:
        product += bias.float()
    return product.to(torch.bfloat16)
