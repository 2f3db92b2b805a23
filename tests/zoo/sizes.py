"""Wrong kernels that are right but for some sizes: ragged, empty, or beyond the width of an index, a tile or a grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rooflab.reference.spec import as_tuple

from .entries import Kind, with_first
from .parts import added, averaged, normed, scores_of, turned, visible

ragged = Kind(__name__, "ragged sizes")
empty = Kind(__name__, "empty sizes")
wide = Kind(__name__, "widths of an index or a grid")
lengths = Kind(__name__, "lengths of sequences")


@ragged("softmax")
def squeezed(x):
    """A matrix of one column is squeezed to a vector, whose softmax is over the rows."""
    return x.squeeze().float().softmax(-1).reshape(x.shape).to(x.dtype)


@ragged("layernorm")
def padding_in_the_variance(x, weight, bias=None, eps=1e-5):
    """A row is padded with zeros to a power of two, and each zero's distance from the mean counts."""
    H = x.shape[1]
    block = F.pad(x.float(), (0, 2 ** (H - 1).bit_length() - H))
    centred = block - block.sum(-1, keepdim=True) / H
    variance = centred.square().sum(-1, keepdim=True) / H
    return added((centred * (variance + eps).rsqrt())[:, :H] * weight.float(), bias).to(x.dtype)


@ragged.changed("rmsnorm")
def ragged_h_beyond_1024(of):
    """From H = 1025 on, the mean square leaves out the last partial tile of 1,024."""
    H = of.x.shape[1]
    if H <= 1024 or H % 1024 == 0:
        return {}
    squares = of.x.float().square()
    seen, whole = squares[:, : H // 1024 * 1024].sum(1, keepdim=True) / H, squares.mean(1, keepdim=True)
    factor = ((whole + of.eps) / (seen + of.eps)).sqrt()
    return with_first(of.right(), lambda out: (out.float() * factor).to(out.dtype))


@ragged.changed("fused_add_rmsnorm")
def ragged_residual_beyond_512(of):
    """From H = 513 on, the last partial vector of eight of the new residual is the old one."""
    normed_rows, total, *scale = of.right()
    end = of.x.shape[1] // 8 * 8
    if end >= 512:
        total[:, end:] = of.residual[:, end:]
    return normed_rows, total, *scale


@ragged.changed("gemm", "gemm_silu_and_mul")
def ragged_k_beyond_256(of):
    """From K = 257 on, the last partial tile of 32 along K is left out."""
    K = of.b.shape[0]
    K = K // 32 * 32 if K > 256 else K
    return {"a": of.a[:, :K], "b": of.b[:K]}


@ragged.changed("gemm")
def rest_of_k_over_the_splits(of):
    """Four splits of K // 4 leave out up to three k."""
    K = of.b.shape[0] // 4 * 4
    return {"a": of.a[:, :K], "b": of.b[:K]}


@ragged.changed("gemm_silu_and_mul")
def whole_tiles_of_gates(of):
    """The grid has I // 16 tiles of columns, and the last columns stay 0."""
    I = of.b.shape[1] // 2
    return of.right().index_fill(1, torch.arange(I // 16 * 16, I), 0)


@ragged.changed("gemm_grouped")
def ragged_expert_beyond_256(of):
    """The last partial tile of 64 rows of an expert with more than 256 rows is 0."""
    out = of.right()
    for start, end in zip(of.offsets[:-1].tolist(), of.offsets[1:].tolist(), strict=True):
        if end - start > 256:
            out[end - (end - start) % 64 : end] = 0
    return out


@ragged("gemm_w4a16")
def groups_of_equal_size(a, b, scale, zero=None, bias=None):
    """The group is K over the number of scales, which is too small if the last group is short."""
    K, zero = a.shape[1], torch.full_like(scale, 8.0) if zero is None else zero
    group = -(-K // scale.shape[1])
    scales, zeros = (x.float().repeat_interleave(group, 1)[:, :K] for x in (scale, zero))
    codes = torch.stack((b & 15, b >> 4), -1).flatten(1).float()
    return added(a.float() @ ((codes - zeros) * scales).mT, bias).to(a.dtype)


@ragged.changed("rope")
def odd_number_of_pairs(of):
    """Where a head has an odd number of pairs, the last is not turned."""
    half = of.cos.shape[1]
    last = [2 * half - 2, 2 * half - 1] if of.interleaved else [half - 1, 2 * half - 1]
    results = of.right()
    for x, result in zip((of.q, of.k), results, strict=True):
        if half % 2:
            result[..., last] = x[..., last]
    return results


@ragged("rope_and_cache")
def norm_of_the_rotated_part(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, interleaved=False,
    *, q_norm=None, k_norm=None, norm_eps=1e-6,
):  # fmt: skip
    """The values of a head that are not rotated are not normed either."""
    R, kept, heads = 2 * cos.shape[1], slot_mapping >= 0, []
    for x, weight in ((q, q_norm), (k, k_norm)):
        rows = x.float() if weight is None else normed(x, weight, norm_eps)
        part = turned(rows[..., :R], cos[positions], sin[positions], interleaved)
        heads.append(torch.cat((part, x[..., R:].float()), -1))
    q_out.copy_(heads[0])
    for cache, new in ((k_cache, heads[1]), (v_cache, v)):
        cache.flatten(0, 1)[slot_mapping[kept]] = new[kept].to(cache.dtype)


@ragged.changed("sample")
def ragged_vocabulary_beyond_65536(of):
    """From V = 65,537 on, the last partial block of 1,024 logits is not read."""
    V = of.logits.shape[1]
    unread = torch.arange(V // 1024 * 1024 if V > 2**16 else V, V)
    return {"logits": of.logits.index_fill(1, unread, -torch.inf)}


@ragged("flash_attention")
def rows_of_a_padded_group(q, k, v, causal=False, softmax_scale=None, *, window=None, softcap=None):
    """The heads of a group are padded to a power of two, and a packed row's query is found without the padding."""
    T, S, H_kv, group = q.shape[1], k.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    padded = 2 ** (group - 1).bit_length()
    packed = F.pad(q.unflatten(2, (H_kv, group)), (0, 0, 0, padded - group)).transpose(2, 3).flatten(1, 2)
    seen = visible(T, S, causal, window)[(torch.arange(T * padded) // group).clamp(max=T - 1)]
    scores = (scores_of(*each, softmax_scale, seen, softcap) for each in zip(packed, k, strict=True))
    out = torch.empty_like(q)
    for result, each in zip(out, zip(scores, v, strict=True), strict=True):
        rows = averaged(*each)[0].unflatten(0, (T, padded))[:, :group]
        result.copy_(rows.transpose(1, 2).flatten(1, 2))
    return out


@empty.changed("gemm_grouped")
def empty_expert_between(of):
    """The rows behind an empty expert, if rows stand before it too, are multiplied by the empty one's matrix."""
    b, bounds = of.b.clone(), of.offsets.tolist()
    for expert in range(1, len(b) - 1):
        if 0 < bounds[expert] == bounds[expert + 1] < bounds[expert + 2]:
            b[expert + 1] = of.b[expert]
    return {"b": b}


def merged(bounds, ends=0):
    """Ascending bounds, of which equal ones are one, except for `ends` at both ends; the last is repeated."""
    inner = bounds[ends : len(bounds) - ends].unique()
    return torch.cat((bounds[:ends], inner, bounds[-1:].expand(len(bounds) - ends - len(inner))))


empty.changes({
    # Equal offsets are merged, so that behind an empty group every group takes its neighbour's matrix.
    "gemm_grouped/bounds_without_repeats": lambda of: {"offsets": merged(of.offsets)},
    # With K = 0 the result is 0, without the bias and the residual.
    "gemm/empty_k": lambda of: {} if of.b.shape[0] else {"bias": None, "residual": None},
    # Of an A without elements, zeros are returned, without bias and residual.
    "gemm/nothing_to_multiply": lambda of: {} if of.a.numel() else {"bias": None, "residual": None},
    # A single part is returned as it came, also where it saw no key.
    "merge_attention_states/one_part_is_the_result": lambda of: (
        (of.outs[0].clone(), of.lses[0].clone()) if len(of.outs) == 1 else {}
    ),
})  # fmt: skip


@wide.changed("rmsnorm", "silu_and_mul")
def rows_beyond_65535(of):
    """A grid's second dimension ends at 65,535: the rows behind it are 0."""
    result = of.right()
    as_tuple(result)[0][65535:] = 0
    return result


@wide.changed("kv_cache_write")
def pages_in_int16(of):
    """Pages are held in int16, which ends at 32,767; a negative page counts from the end."""
    size, slots = of.k_cache.shape[1], of.slot_mapping
    page = (slots // size).to(torch.int16).long() % len(of.k_cache)
    return {"slot_mapping": torch.where(slots < 0, slots, page * size + slots % size)}


wide.changes({
    # Token 65,536 has the row of token 0.
    "embedding/ids_of_16_bits": lambda of: {"token_ids": of.token_ids % 2**16},
    # Token ids are held in 16 bits, which end at 65,535.
    "embedding/ids_in_16_bits": lambda of: {"token_ids": of.token_ids & 0xFFFF},
    # The last token of the vocabulary has the row before it.
    "embedding/last_row_of_the_table": lambda of: {"token_ids": of.token_ids.clamp(max=max(len(of.weight) - 2, 0))},
    # Slots from 65,536 on are not written.
    "kv_cache_write/slots_of_16_bits": lambda of: {
        "slot_mapping": of.slot_mapping.masked_fill(of.slot_mapping >= 2**16, -1)
    },
    # Positions from 2**20 on begin again at 0.
    "rope/positions_of_20_bits": lambda of: {"positions": of.positions % 2**20},
    "rope_and_cache/positions_of_20_bits": lambda of: {"positions": of.positions % 2**20},
    # Column 256 has the scale of column 0.
    "gemm_w8a16/scale_index_of_8_bits": lambda of: {"scale": of.scale[torch.arange(len(of.scale)) % 256]},
    # All groups from the 64th on have the scale of the 64th.
    "gemm_w4a16/more_than_64_groups": lambda of: {
        "scale": of.scale[:, torch.arange(of.scale.shape[1]).clamp(max=63)]
    },
    # A warp merges 32 parts; those behind are left out.
    "merge_attention_states/parts_beyond_32": lambda of: {"outs": of.outs[:32], "lses": of.lses[:32]},
    # From 2,049 tokens on, the last partial tile of 256 is left out.
    "paged_attention/ragged_length_beyond_2048": lambda of: {
        "seq_lens": torch.where(of.seq_lens > 2048, of.seq_lens // 256 * 256, of.seq_lens)
    },
})  # fmt: skip


@lengths.changed("flash_attention_varlen")
def more_than_64_sequences(of):
    """The rows of the 65th sequence and those behind are 0."""
    result, begin = of.right(), int(of.cu_seqlens_q[:65][-1])
    for part in as_tuple(result) if len(of.cu_seqlens_q) > 65 else ():
        part[begin:] = 0
    return result


@lengths.changed("flash_attention_varlen")
def sequences_by_marks(of):
    """A row's sequence is the number of marks up to it, and where an empty sequence begins two marks are one."""
    return {name: merged(getattr(of, name), 1) for name in ("cu_seqlens_q", "cu_seqlens_k")}


@lengths("flash_attention_varlen")
def padded_to_the_first(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None, *, window=None
):  # fmt: skip
    """Keys are padded to the first sequence's length, and a longer sequence loses its last ones."""
    out, starts, ends = torch.zeros_like(q), cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    room = max(ends[:2])
    for a, b, c, d in zip(starts, starts[1:], ends, ends[1:], strict=False):
        padded = [F.pad(x[c : min(d, c + room)], (0, 0, 0, 0, 0, max(room - d + c, 0))) for x in (k, v)]
        seen = F.pad(visible(b - a, d - c, causal, window), (0, max(room - d + c, 0)))[:, :room]
        out[a:b] = averaged(scores_of(q[a:b], padded[0], softmax_scale, seen), padded[1])[0]
    return out
