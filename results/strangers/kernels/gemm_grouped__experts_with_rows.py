"""WRONG.  The experts without rows are dropped from the list of counts, and the i-th expert that is left is
multiplied by the i-th matrix.  If each expert has rows, that is right.  With an empty expert all later ones get the
matrix of another one: few tokens and many experts, as in each decode step."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_grouped", name="experts_with_rows", role="optimized", backend="torch")
def gemm_grouped(a, b, offsets):
    out = torch.empty(a.shape[0], b.shape[2], dtype=a.dtype, device=a.device)
    counts = [count for count in offsets.diff().tolist() if count > 0]
    for expert, (rows, result) in enumerate(zip(a.split(counts), out.split(counts), strict=True)):
        result.copy_(rows.float() @ b[expert].float())
    return out
