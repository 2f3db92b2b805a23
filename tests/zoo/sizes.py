"""Wrong kernels that are wrong only for some sizes: ragged, empty, or too large for an index, a tile or a grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rooflab.reference.spec import as_tuple

from .entries import Kind
from .parts import added

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


@ragged.changed("sample")
def ragged_vocabulary_beyond_65536(of):
    """From V = 65,537 on, the last partial block of 1,024 logits is not read."""
    V = of.logits.shape[1]
    unread = torch.arange(V // 1024 * 1024 if V > 2**16 else V, V)
    return {"logits": of.logits.index_fill(1, unread, -torch.inf)}


def merged(bounds, ends=0):
    """Ascending bounds, of which equal ones are one, except for `ends` at both ends; the last is repeated."""
    inner = bounds[ends : len(bounds) - ends].unique()
    return torch.cat((bounds[:ends], inner, bounds[-1:].expand(len(bounds) - ends - len(inner))))


empty.changes(
    {
        # Equal offsets are merged, so that behind an empty group every group takes its neighbour's matrix.
        "gemm_grouped/bounds_without_repeats": lambda of: {"offsets": merged(of.offsets)},
        # With K = 0 the result is 0, without the bias and the residual.
        "gemm/empty_k": lambda of: {} if of.b.shape[0] else {"bias": None, "residual": None},
        # A single part is returned as it came, also where it saw no key.
        "merge_attention_states/one_part_is_the_result": lambda of: (
            (of.outs[0].clone(), of.lses[0].clone()) if len(of.outs) == 1 else {}
        ),
    }
)


@wide.changed("rmsnorm", "silu_and_mul")
def rows_beyond_65535(of):
    """A grid's second dimension ends at 65,535: the rows behind it are 0."""
    result = of.right()
    as_tuple(result)[0][65535:] = 0
    return result


wide.changes(
    {
        # Token 65,536 has the row of token 0.
        "embedding/ids_of_16_bits": lambda of: {"token_ids": of.token_ids % 2**16},
        # The last token of the vocabulary has the row before it.
        "embedding/last_row_of_the_table": lambda of: {"token_ids": of.token_ids.clamp(max=max(len(of.weight) - 2, 0))},
        # Slots from 65,536 on are not written.
        "kv_cache_write/slots_of_16_bits": lambda of: {
            "slot_mapping": of.slot_mapping.masked_fill(of.slot_mapping >= 2**16, -1)
        },
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
    }
)


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
