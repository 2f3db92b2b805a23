"""RIGHT.  The heads are done one after another, the last first, each for all tokens at once: a head is multiplied
by the cosines, its columns are then swapped in pairs by an index and multiplied by signed sines.  Columns that are
not rotated have the cosine 1 and the sine 0.  Slots are written in ascending order."""

import torch

from rooflab.kernels.registry import register


@register(op="rope_and_cache", name="head_by_head", role="optimized", backend="torch")
def rope_and_cache(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, interleaved=False,
    *, k_scale=None, v_scale=None, q_norm=None, k_norm=None, norm_eps=1e-6,
):  # fmt: skip
    (T, _, D), half = q.shape, cos.shape[1]
    column = torch.arange(D, device=q.device)
    swapped, c, s = column.clone(), q.new_ones((T, D), dtype=torch.float64), q.new_zeros((T, D), dtype=torch.float64)
    first = column[0 : 2 * half : 2] if interleaved else column[:half]
    second = column[1 : 2 * half : 2] if interleaved else column[half : 2 * half]
    swapped[first], swapped[second] = second, first
    c[:, first] = c[:, second] = cos[positions].double()
    s[:, second] = sin[positions].double()
    s[:, first] = -s[:, second]
    order = torch.argsort(slot_mapping)
    order = order[slot_mapping[order] >= 0]
    slots = slot_mapping[order]

    def turned(x, weight):
        value = x.double()
        if weight is not None:
            value = value / (value.square().mean(-1, keepdim=True) + norm_eps).sqrt() * weight.double()
        return value * c + value[:, swapped] * s

    def write(cache, head, value, scale):
        value = value[order]
        if scale is not None:
            value = (value / scale[head].double()).clamp(-448.0, 448.0).float()
        cache.flatten(0, 1)[slots, head] = value.to(cache.dtype)

    for head in reversed(range(q.shape[1])):
        q_out[:, head] = turned(q[:, head], q_norm).to(q_out.dtype)
    for head in reversed(range(k.shape[1])):
        write(k_cache, head, turned(k[:, head], k_norm), k_scale)
        write(v_cache, head, v[:, head].double(), v_scale)
