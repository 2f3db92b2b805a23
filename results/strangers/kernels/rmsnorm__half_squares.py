"""WRONG.  The squares are taken in the dtype of x, and only their sum is fp32.  In fp16 the square of a value above
256 is infinite, so a row with one outlier channel (attention sinks, massive activations) becomes zero."""

from rooflab.kernels.registry import register


@register(op="rmsnorm", name="half_squares", role="optimized", backend="torch")
def rmsnorm(x, weight, eps=1e-6, *, weight_offset=0.0, round_first=False):
    mean_square = (x * x).float().mean(dim=-1, keepdim=True)
    scaled = x.float() * (mean_square + eps).rsqrt()
    if round_first:
        scaled = scaled.to(x.dtype).float()
    return (scaled * (weight.float() + weight_offset)).to(x.dtype)
