"""WRONG.  The sum is made in place in `residual.float()`.  For fp16 and bf16 that is a new tensor.  For fp32 it is
the caller's residual itself: the call overwrites it, and a second call with the same residual adds x twice."""

from rooflab.kernels.registry import register


@register(op="fused_add_rmsnorm", name="float_alias", role="optimized", backend="torch")
def fused_add_rmsnorm(x, residual, weight, eps=1e-6, *, weight_offset=0.0, round_first=False):
    total = residual.float()
    total += x.float()
    new_residual = total.to(x.dtype)
    rounded = new_residual.float()
    scaled = rounded * (rounded.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    if round_first:
        scaled = scaled.to(x.dtype).float()
    return (scaled * (weight.float() + weight_offset)).to(x.dtype), new_residual
