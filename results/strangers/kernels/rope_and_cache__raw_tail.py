"""WRONG.  The columns of a head behind the rotated ones are copied from the inputs as they came.  Without a norm
that is right, and so is a norm with all columns rotated.  A model with both a norm of the heads and a partial
rotation gets these columns without their norm."""

import torch

from rooflab.kernels.registry import register


def normed(x, weight, eps):
    value = x.float()
    return value if weight is None else value * (value.square().mean(-1, True) + eps).rsqrt() * weight.float()


@register(op="rope_and_cache", name="raw_tail", role="optimized", backend="torch")
def rope_and_cache(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, interleaved=False,
    *, k_scale=None, v_scale=None, q_norm=None, k_norm=None, norm_eps=1e-6,
):  # fmt: skip
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]

    def rotated(x, weight):
        head = normed(x, weight, norm_eps)[..., : 2 * half]
        if interleaved:
            a, b = head.unflatten(-1, (half, 2)).unbind(-1)
            head = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        else:
            a, b = head[..., :half], head[..., half:]
            head = torch.cat((a * c - b * s, b * c + a * s), -1)
        return torch.cat((head, x[..., 2 * half :].float()), -1)

    q_out.copy_(rotated(q, q_norm))
    kept = slot_mapping >= 0
    for new, cache, scale in ((rotated(k, k_norm), k_cache, k_scale), (v.float(), v_cache, v_scale)):
        if scale is not None:
            new = (new / scale[:, None]).clamp(-448.0, 448.0)
        cache.flatten(0, 1)[slot_mapping[kept]] = new[kept].to(cache.dtype)
