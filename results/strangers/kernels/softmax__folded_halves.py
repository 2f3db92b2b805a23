"""RIGHT.  The row is padded with -inf to a power of two and folded: in each step the right half of the pairs
(maximum, sum) is merged into the left half, until one pair is left.  A pair of -inf alone has the sum 0."""

import math

import torch

from rooflab.kernels.registry import register


@register(op="softmax", name="folded_halves", role="optimized", backend="torch")
def softmax(x):
    H = x.shape[-1]
    if x.numel() == 0:
        return torch.empty_like(x)
    width = 1 << (H - 1).bit_length()
    peak = torch.nn.functional.pad(x.double(), (0, width - H), value=-math.inf)
    total = (peak > -math.inf).double()
    while width > 1:
        width //= 2
        left, right = peak[:, :width], peak[:, width:]
        peak = torch.maximum(left, right)
        shift = torch.where(peak == -math.inf, 0.0, peak)
        total = total[:, :width] * torch.exp(left - shift) + total[:, width:] * torch.exp(right - shift)
    return (torch.exp(x.double() - peak) / total).to(x.dtype)
