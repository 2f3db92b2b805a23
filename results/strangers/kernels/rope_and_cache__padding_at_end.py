"""WRONG.  Tokens without a slot are taken for padding at the end of the batch: the first n tokens are written, n being
the number of slots that are not -1.  Padding for a CUDA graph lies at the end.  A token in the middle (a prefix that is
cached already, a rejected draft) has -1 too: it is written to the last slot, and the last token is lost."""

from rooflab.kernels.registry import register


def rms(x, weight, eps):
    if weight is None:
        return x
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.float()


@register(op="rope_and_cache", name="padding_at_end", role="optimized", backend="torch")
def rope_and_cache(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, interleaved=False,
    *, k_scale=None, v_scale=None, q_norm=None, k_norm=None, norm_eps=1e-6,
):  # fmt: skip
    R = 2 * cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    one, two = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    turned = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        value = rms(x.float(), weight, norm_eps)
        out = value.clone()
        out[..., one] = value[..., one] * c - value[..., two] * s
        out[..., two] = value[..., two] * c + value[..., one] * s
        turned.append(out)
    q_out.copy_(turned[0])
    count = int((slot_mapping >= 0).sum())
    slots = slot_mapping[:count]
    for new, cache, scale in ((turned[1], k_cache, k_scale), (v.float(), v_cache, v_scale)):
        new = new if scale is None else (new / scale[:, None]).clamp(-448.0, 448.0)
        cache.view(-1, *cache.shape[2:])[slots] = new[:count].to(cache.dtype)
