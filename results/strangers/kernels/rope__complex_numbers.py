"""RIGHT.  Each pair is one complex number, and the rotation is a complex product in fp64.  Tokens are done in the
order of their positions, so that a row of the tables is read once for all tokens at it."""

import torch

from rooflab.kernels.registry import register


@register(op="rope", name="complex_numbers", role="optimized", backend="torch")
def rope(q, k, cos, sin, positions, interleaved=False):
    table = torch.complex(cos.double(), sin.double())
    found, at = torch.unique(positions, return_inverse=True)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    half = q.shape[-1] // 2
    order = torch.argsort(at, stable=True)
    bounds = torch.bincount(at, minlength=len(found)).cumsum(0).tolist() if len(found) else []
    for position, start, end in zip(found.tolist(), [0, *bounds[:-1]], bounds, strict=True):
        tokens = order[start:end]
        for x, out in ((q, q_out), (k, k_out)):
            part = x[tokens].double()
            if interleaved:
                turned = torch.view_as_complex(part.unflatten(-1, (half, 2)).contiguous()) * table[position]
                out[tokens] = torch.view_as_real(turned).flatten(-2).to(out.dtype)
            else:
                turned = torch.complex(part[..., :half], part[..., half:]) * table[position]
                out[tokens] = torch.cat((turned.real, turned.imag), dim=-1).to(out.dtype)
    return q_out, k_out
