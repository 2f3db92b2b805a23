"""RIGHT.  The weight is taken apart into its eight bits.  For each bit, the lowest first, the activations are
multiplied by the plane of zeros and ones; the highest bit counts -128.  All sums are fp64, which holds them almost
exactly."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_w8a16", name="bit_planes", role="optimized", backend="torch")
def gemm_w8a16(a, b, scale, bias=None):
    left, codes = a.double(), b.to(torch.int64)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for bit in range(8):
        plane = (codes >> bit) & 1
        total += (left @ plane.double()) * (-128.0 if bit == 7 else 2.0**bit)
    total *= scale.double()
    if bias is not None:
        total += bias.double()
    return total.to(torch.bfloat16)
