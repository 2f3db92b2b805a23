"""RIGHT.  An e4m3 value is a whole number of 512ths, so the products of each 128 of K are summed as 64-bit
integers, without any rounding, from the last group to the first.  The sums are scaled in fp64."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_fp8", name="whole_numbers", role="optimized", backend="torch")
def gemm_fp8(a, b, a_scale, b_scale, bias=None, *, fast_accum=False):
    (M, K), N = a.shape, b.shape[1]
    left, right = (torch.ldexp(x.float(), torch.tensor(9)).long() for x in (a, b))
    total = torch.zeros(M, N, dtype=torch.float64, device=a.device)
    for start in reversed(range(0, K, 128)):
        part = (left[:, start : start + 128] @ right[start : start + 128]).double() * 2.0**-18
        if a_scale.ndim == 2:
            wide = b_scale[start // 128].double().repeat_interleave(128)[:N]
            total += part * a_scale[:, start // 128, None].double() * wide
        else:
            total += part * (a_scale.double() * b_scale.double()).reshape(())
    if bias is not None:
        total += bias.double()
    return total.to(torch.bfloat16)
