"""WRONG.  The rows of the tables for this step's positions are kept for the next layer, under the address of the
positions.  A server refills the same tensor of positions in each step.  Then the address is the same, and from the
second step on q and k are rotated by the angles of the first one."""

import torch

from rooflab.kernels.registry import register

kept = {}


@register(op="rope", name="kept_by_pointer", role="optimized", backend="torch")
def rope(q, k, cos, sin, positions, interleaved=False):
    key = (positions.data_ptr(), len(positions), cos.data_ptr(), cos.shape)
    if key not in kept:
        if len(kept) > 16:
            kept.clear()
        kept[key] = cos[positions][:, None], sin[positions][:, None]
    c, s = kept[key]
    turned = []
    for x in (q.float(), k.float()):
        if interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
            pair = torch.stack((first * c - second * s, second * c + first * s), dim=-1).flatten(-2)
        else:
            first, second = x.chunk(2, dim=-1)
            pair = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
        turned.append(pair.to(q.dtype))
    return tuple(turned)
