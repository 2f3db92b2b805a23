"""Wrong kernels as people write them, each with one everyday mistake about sizes, lengths, or what a call leaves to the
next one, to measure the checker.

As in `everyday_inputs.py`: written without a look at what the checker draws, right on an ordinary input.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rooflab.kernels.speculative_verify.naive import naive as speculative_verify

sys.path.insert(0, str(Path(__file__).parent))
from everyday_parts import (  # noqa: E402
    _added,
    _averaged,
    _blocks,
    _codes,
    _decoded,
    _flash,
    _grouped,
    _in_slots,
    _mla,
    _noise,
    _norm,
    _raced,
    _read,
    _result,
    _rotated,
    _scores,
    _seen,
    _shares,
    _sorted,
    _varlen,
    everyday,
)

_kept: dict[Any, Any] = {}
"""What the kernels of the last part keep between calls; a key begins with a word of its kernel's own."""


# Sizes and lengths.


@everyday("softmax")
def squeezed(x):
    """A matrix of one column is squeezed to a vector, whose softmax is over the rows."""
    return x.squeeze().float().softmax(-1).reshape(x.shape).to(x.dtype)


@everyday("layernorm")
def padding_in_the_variance(x, weight, bias=None, eps=1e-5):
    """A row is padded with zeros to a power of two, and each zero's distance from the mean counts."""
    H = x.shape[1]
    block = F.pad(x.float(), (0, 2 ** (H - 1).bit_length() - H))
    centred = block - block.sum(-1, keepdim=True) / H
    variance = centred.square().sum(-1, keepdim=True) / H
    return _added((centred * (variance + eps).rsqrt())[:, :H] * weight.float(), bias).to(x.dtype)


@everyday("gemm")
def rest_of_k_over_the_splits(a, b, bias=None, *, residual=None, precision="ieee"):
    """Four splits of K // 4 leave out up to three k."""
    part = a.shape[1] // 4
    splits = (slice(i * part, (i + 1) * part) for i in range(4))
    return _added(sum(a[:, k].float() @ b[k].float() for k in splits), bias, residual).to(a.dtype)


@everyday("gemm")
def nothing_to_multiply(a, b, bias=None, *, residual=None, precision="ieee"):
    """With K = 0 zeros are returned, without bias and residual."""
    if not a.numel():
        return a.new_zeros(len(a), b.shape[1])
    return _added(a.float() @ b.float(), bias, residual).to(a.dtype)


@everyday("gemm_grouped")
def bounds_without_repeats(a, b, offsets):
    """Equal offsets are merged, so that behind an empty group every group takes its neighbour's matrix."""
    return _grouped(a, b, offsets.unique().tolist())


@everyday("gemm_silu_and_mul")
def whole_tiles_of_gates(a, b):
    """The grid has I // 16 tiles of columns, and the last columns stay 0."""
    I = b.shape[1] // 2
    out = a.new_zeros(len(a), I)
    for start in range(0, I // 16 * 16, 16):
        gate, up = (a.float() @ b[:, at : at + 16].float() for at in (start, I + start))
        out[:, start : start + 16] = gate * gate.sigmoid() * up
    return out


@everyday("gemm_w4a16")
def groups_of_equal_size(a, b, scale, zero=None, bias=None):
    """The group is K over the number of scales, which is too small if the last group is short."""
    K, zero = a.shape[1], torch.full_like(scale, 8.0) if zero is None else zero
    group = -(-K // scale.shape[1])
    scales, zeros = (x.float().repeat_interleave(group, 1)[:, :K] for x in (scale, zero))
    return _added(a.float() @ ((_codes(b) - zeros) * scales).mT, bias).to(a.dtype)


@everyday("kv_cache_write")
def pages_in_int16(k, v, k_cache, v_cache, slot_mapping):
    """Pages are held in int16, which ends at 32,767."""
    kept, size = slot_mapping >= 0, k_cache.shape[1]
    pages = (slot_mapping[kept] // size).to(torch.int16)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[pages.long(), slot_mapping[kept] % size] = new[kept]


@everyday("kv_cache_write")
def skipped_tokens_keep_slot_0(k, v, k_cache, v_cache, slot_mapping):
    """A skipped token stores what slot 0 held before, perhaps over another token's value."""
    slots, kept = slot_mapping.clamp(min=0), (slot_mapping >= 0)[:, None, None]
    for cache, new in ((k_cache, k), (v_cache, v)):
        rows = cache.flatten(0, 1)
        for slot, row in zip(slots.tolist(), torch.where(kept, new, rows[slots]), strict=True):
            rows[slot] = row


@everyday("rope_and_cache")
def norm_of_the_rotated_part(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, interleaved=False,
    *, q_norm=None, k_norm=None, norm_eps=1e-6,
):  # fmt: skip
    """The values of a head that are not rotated are not normed either."""
    R, turned = 2 * cos.shape[1], []
    for x, weight in ((q, q_norm), (k, k_norm)):
        normed = x.float() if weight is None else _norm(x, weight, norm_eps)
        turned.append(torch.cat((normed[..., :R], x[..., R:].float()), -1))
    q, k = (_rotated(x, cos, sin, positions, interleaved) for x in turned)
    q_out.copy_(q)
    _in_slots(slot_mapping, (k_cache, k), (v_cache, v))


@everyday("sample")
def widest_top_k(logits, temperature, top_k, top_p, min_p, seed, position):
    """All rows are cut to the largest top_k of the batch, also one without top_k."""
    widest = (int(top_k.max()) if len(top_k) else 0) or logits.shape[1]
    ordered, order = (x[:, :widest] for x in _sorted(logits))
    return _raced(ordered, order, temperature, top_k, top_p, min_p, _noise(logits, seed, position))


@everyday("merge_attention_states")
def one_part_is_the_result(outs, lses):
    """A single part is returned as it came, also where it saw no key."""
    if len(outs) == 1:
        return outs[0].clone(), lses[0].clone()
    weights, total = _shares(lses)
    return (weights * outs.float().where(weights > 0, 0)).sum(0).to(outs.dtype), total


@everyday("mla_decode")
def length_of_the_first(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    """Scores have room for the first sequence's length, and a longer one loses its end."""
    lengths = seq_lens.clamp(max=int(seq_lens[0])).tolist()
    return _mla(q, kv_cache, block_table, lengths, latent_dim, softmax_scale, return_lse)


@everyday("paged_attention")
def page_by_a_reciprocal(
    q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None,
    *, cu_seqlens_q=None, window=None, softcap=None, sinks=None, return_lse=False,
):  # fmt: skip
    """A page is token * (1 / block_size) in fp32, which may end just below a whole number."""
    pairs, bounds, size = [], range(len(q) + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist(), k_cache.shape[1]
    for b, length in enumerate(seq_lens.tolist()):
        queries, token = q[bounds[b] : bounds[b + 1]], torch.arange(length)
        page = block_table[b].long()[(token.float() * (1.0 / size)).long()].clamp(0, len(k_cache) - 1)
        k, v = k_cache[page, token % size], v_cache[page, token % size]
        scores = _scores(queries, k, softmax_scale, _seen(len(queries), length, True, window), softcap)
        pairs.append(_averaged(scores, v, sinks))
    return _result(pairs, q.dtype, return_lse, torch.cat)


@everyday("flash_attention")
def rows_of_a_padded_group(q, k, v, causal=False, softmax_scale=None, *, window=None, softcap=None):
    """The heads of a group are padded to a power of two, and a packed row's query is found without the padding."""
    T, S, H_kv, group = q.shape[1], k.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    padded = 2 ** (group - 1).bit_length()
    packed = F.pad(q.unflatten(2, (H_kv, group)), (0, 0, 0, padded - group)).transpose(2, 3).flatten(1, 2)
    seen = _seen(T, S, causal, window)[(torch.arange(T * padded) // group).clamp(max=T - 1)]
    out = _flash(packed, k, v, seen, softmax_scale, softcap).unflatten(1, (T, padded))
    return out[:, :, :group].transpose(2, 3).flatten(2, 3)


@everyday("flash_attention")
def window_longer_than_the_keys(
    q, k, v, causal=False, softmax_scale=None, *, window=None, softcap=None, sinks=None, return_lse=False
):  # fmt: skip
    """Only the keys of the windows are read, and those from before the first key begin at a negative index."""
    T, S = q.shape[1], k.shape[1]
    own = slice(None if window is None else S - T + 1 - window, None)
    seen = _seen(T, S, causal, window)[:, own]
    return _flash(q, k[:, own], v[:, own], seen, softmax_scale, softcap, sinks, return_lse)


@everyday("flash_attention_varlen")
def sequences_by_marks(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None, *, window=None
):  # fmt: skip
    """A row's sequence is the number of marks up to it, and where an empty sequence begins two marks are one."""
    ids, out = [], torch.zeros_like(q)
    for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k)):
        marks = torch.zeros(len(x) + 1, dtype=torch.int64)
        marks[cu[1:-1].long()] = 1
        ids.append(marks.cumsum(0)[:-1])
    for b in range(len(cu_seqlens_q) - 1):
        mine, theirs = (own == b for own in ids)
        seen = _seen(int(mine.sum()), int(theirs.sum()), causal, window)
        out[mine] = _averaged(_scores(q[mine], k[theirs], softmax_scale, seen), v[theirs])[0].to(q.dtype)
    return out


@everyday("flash_attention_varlen")
def padded_to_the_first(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None, *, window=None
):  # fmt: skip
    """Keys are padded to the first sequence's length, and a longer sequence loses its last ones."""
    out, starts, ends = torch.zeros_like(q), cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    room = max(ends[:2])
    for a, b, c, d in zip(starts, starts[1:], ends, ends[1:], strict=False):
        padded = [F.pad(x[c : min(d, c + room)], (0, 0, 0, 0, 0, max(room - d + c, 0))) for x in (k, v)]
        seen = F.pad(_seen(b - a, d - c, causal, window), (0, max(room - d + c, 0)))[:, :room]
        out[a:b] = _averaged(_scores(q[a:b], padded[0], softmax_scale, seen), padded[1])[0]
    return out


@everyday("embedding")
def ids_in_16_bits(token_ids, weight):
    """Token ids are held in 16 bits, which end at 65,535."""
    return weight[token_ids & 0xFFFF]


# What a call leaves to the next one.


@everyday("softmax")
def result_is_kept(x):
    """The result's memory is kept by shape, and the next call writes over what this one returned."""
    out = _kept.setdefault(("softmax", x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
    return out.copy_(x.float().softmax(-1))


@everyday("rmsnorm")
def weight_by_its_address(x, weight, eps=1e-6, *, weight_offset=0.0):
    """The weight in fp32 is kept by address, and other weights may lie there later."""
    wide = _kept.setdefault(("norm", weight.data_ptr(), len(weight)), weight.to(torch.float32, copy=True))
    return _norm(x, wide, eps, weight_offset).to(x.dtype)


@everyday("layernorm")
def grid_of_the_first_call(x, weight, bias=None, eps=1e-5):
    """The first call for a width decides the grid, and later calls leave rows beyond it 0."""
    out, rows = x.new_zeros(x.shape), _kept.setdefault(("grid", x.shape[1]), len(x))
    centred = x[:rows].float() - x[:rows].float().mean(-1, keepdim=True)
    scaled = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    out[:rows] = _added(scaled, bias)
    return out


@everyday("fused_add_rmsnorm")
def residual_in_place(x, residual, weight, eps=1e-6, *, weight_offset=0.0):
    """The sum is written over the residual, which the caller may still need."""
    residual += x
    return _norm(residual, weight, eps, weight_offset).to(x.dtype), residual


@everyday("gemm")
def arrivals_are_not_set_back(a, b, bias=None, *, residual=None, precision="ieee"):
    """The last part of K to arrive adds bias and residual, but the next call goes on counting."""
    product, parts = torch.zeros(len(a), b.shape[1]), list(zip(a.split(32, 1), b.split(32), strict=True))
    for left, right in parts:
        product += left.float() @ right.float()
        arrived = _kept["arrived", product.shape] = _kept.get(("arrived", product.shape), 0) + 1
        if arrived == len(parts):
            product = _added(product, bias, residual)
    return product.to(a.dtype)


@everyday("gemm_fp8")
def scales_of_the_first_call(a, b, a_scale, b_scale, bias=None, *, fast_accum=False):
    """Scales are spread over the blocks once for a shape."""
    spread = _blocks(a_scale, b_scale, *b.shape)
    rows, columns = _kept.setdefault(("scales", a.shape, b.shape, a_scale.ndim), spread)
    return _added((a.float() * rows) @ (b.float() * columns), bias).to(torch.bfloat16)


@everyday("gemm_grouped")
def plan_by_its_size(a, b, offsets):
    """Rows are dealt to experts once for a number of rows and experts."""
    return _grouped(a, b, _kept.setdefault(("groups", len(a), len(b)), offsets.tolist()))


def _packed_int8(b, scale):
    _kept["int8", *b.shape] = scale.float()
    return b.mT.contiguous()


@everyday("gemm_w8a16", prepare=_packed_int8)
def scale_of_the_last_weight(a, b, scale, bias=None):
    """`prepare` keeps the scales by shape, and so those of the last layer serve all layers."""
    return _added(a.float() @ b.mT.float() * _kept["int8", b.shape[1], b.shape[0]], bias).to(a.dtype)


@everyday("kv_cache_write")
def skips_of_the_first_step(k, v, k_cache, v_cache, slot_mapping):
    """Which tokens have a slot is found once for a number of tokens."""
    kept = _kept.setdefault(("slots", len(k)), slot_mapping >= 0)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.flatten(0, 1)[slot_mapping[kept]] = new[kept]


@everyday("speculative_verify")
def tokens_are_not_cleared(draft_tokens, target_probs, num_drafts, seed, position, *, draft_probs=None):
    """The buffer of tokens is set to -1 once, and behind a short row shows a longer one of an earlier call."""
    args = draft_tokens, target_probs, num_drafts, seed, position
    verified, accepted = speculative_verify(*args, draft_probs=draft_probs)
    tokens = _kept.setdefault(("tokens", verified.shape), torch.full_like(verified, -1))
    tokens[verified >= 0] = verified[verified >= 0]
    return tokens.clone(), accepted


@everyday("merge_attention_states")
def sums_are_not_cleared(outs, lses):
    """The sums over the parts begin where the last call of this shape ended."""
    weights, total = _shares(lses)
    sums = _kept.setdefault(("sums", outs.shape[1:]), torch.zeros(outs.shape[1:]))
    for weight, part in zip(weights, outs.float(), strict=True):
        sums += weight * part.where(weight > 0, 0)
    return sums.to(outs.dtype, copy=True), total


@everyday("mla_decode")
def table_by_its_address(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    """The table is copied once for an address and shape, but an engine writes every step's pages there."""
    table = _kept.setdefault(("table", block_table.data_ptr(), block_table.shape), block_table.clone())
    return _mla(q, kv_cache, table, seq_lens.tolist(), latent_dim, softmax_scale, return_lse)


@everyday("paged_attention")
def splits_of_the_first_call(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, softcap=None):
    """The first call decides how many splits of 32 tokens there are, and longer sequences lose their end."""
    splits = _kept.setdefault(("splits", *k_cache.shape[1:]), -(-int(seq_lens.max()) // 32))
    lengths = seq_lens.clamp(max=32 * splits).tolist()
    return _decoded(q, k_cache, v_cache, block_table, lengths, softmax_scale, softcap=softcap)


@everyday("flash_attention")
def mask_of_the_first_window(
    q, k, v, causal=False, softmax_scale=None, *, window=None, softcap=None, sinks=None, return_lse=False
):  # fmt: skip
    """The mask is kept by the numbers of queries and keys, and a call with another window takes the first one's."""
    T, S = q.shape[1], k.shape[1]
    seen = _kept.setdefault(("mask", T, S, causal), _seen(T, S, causal, window))
    return _flash(q, k, v, seen, softmax_scale, softcap, sinks, return_lse)


@everyday("flash_attention")
def strides_by_shape(
    q, k, v, causal=False, softmax_scale=None, *, window=None, softcap=None, sinks=None, return_lse=False
):  # fmt: skip
    """The strides of k and v are kept by shape, and a call with another layout takes the first one's."""
    strides = _kept.setdefault(("strides", q.shape, k.shape), (k.stride(), v.stride()))
    k, v = (_read(x, x.shape, own) for x, own in zip((k, v), strides, strict=True))
    seen = _seen(q.shape[1], k.shape[1], causal, window)
    return _flash(q, k, v, seen, softmax_scale, softcap, sinks, return_lse)


@everyday("flash_attention_varlen")
def bounds_by_their_ends(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None, *, window=None
):  # fmt: skip
    """The bounds of sequences are copied to the host once for numbers of queries, keys and sequences."""
    key, bounds = ("bounds", len(q), len(k), len(cu_seqlens_q)), (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
    return _varlen(q, k, v, *_kept.setdefault(key, bounds), causal, softmax_scale, window)


@everyday("embedding")
def rows_by_the_address_of_the_ids(token_ids, weight):
    """Rows are kept by the addresses of ids and table, but an engine writes every step's ids to one place."""
    key = "rows", token_ids.data_ptr(), len(token_ids), weight.data_ptr(), weight.shape, weight.dtype
    return _kept.setdefault(key, weight[token_ids]).clone()
