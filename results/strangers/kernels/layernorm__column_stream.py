"""RIGHT.  Welford's algorithm over the columns: the kernel goes through the row one column at a time, for all rows
at once, and updates mean and sum of squares in fp64.  A second pass goes from the last column to the first."""

import torch

from rooflab.kernels.registry import register


@register(op="layernorm", name="column_stream", role="optimized", backend="torch")
def layernorm(x, weight, bias=None, eps=1e-5):
    T, H = x.shape
    columns = x.double().mT.contiguous()
    mean = torch.zeros(T, dtype=torch.float64, device=x.device)
    squares = torch.zeros_like(mean)
    for count, column in enumerate(columns, start=1):
        step = column - mean
        mean += step / count
        squares += step * (column - mean)
    scale = (squares / max(H, 1) + eps).rsqrt()
    out = torch.empty((T, H), dtype=x.dtype, device=x.device)
    for at in range(H - 1, -1, -1):
        value = (columns[at] - mean) * scale * weight[at].double()
        out[:, at] = value if bias is None else value + bias[at].double()
    return out
