"""Wrong kernels as people write them, each with one everyday mistake about strides or values, to measure the checker.

They were written without a look at what the checker draws, and they stay so: mend the checker, not this file.  Each is
right on an ordinary input.  A name says the corner, and the docstring what is wrong there.  By hand,
`ROOFLAB_ATTACK=rows_of_a_view rooflab check rmsnorm --kernel tests/attacks/everyday_inputs.py` registers and checks
one.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from everyday_parts import (  # noqa: E402
    INF,
    _added,
    _blocks,
    _codes,
    _decoded,
    _finite,
    _flash,
    _grouped,
    _in_slots,
    _memory,
    _mla,
    _noise,
    _norm,
    _online,
    _raced,
    _read,
    _result,
    _rotated,
    _scores,
    _seen,
    _shares,
    _sorted,
    _spread,
    _tokens,
    _turned,
    _varlen,
    everyday,
)

# Strides.


@everyday("softmax")
def out_rows_close_together(x, out=None):
    """Rows of the result are stored one behind the other, also where `out` is a part of wider rows."""
    rows = x.float().softmax(-1).to(x.dtype)
    out = torch.empty_like(rows) if out is None else out
    _memory(out)[: rows.numel()] = rows.flatten()
    return out


@everyday("rmsnorm")
def rows_of_a_view(x, weight, eps=1e-6, *, weight_offset=0.0):
    """The stride between rows is taken to be H, also in a view of wider rows."""
    return _norm(_read(x, x.shape, (x.shape[1], 1)), weight, eps, weight_offset).to(x.dtype)


@everyday("fused_add_rmsnorm")
def residual_by_the_stride_of_x(x, residual, weight, eps=1e-6, *, weight_offset=0.0):
    """One stride serves x and the residual."""
    total = x + _read(residual, x.shape, x.stride())
    return _norm(total, weight, eps, weight_offset).to(x.dtype), total


@everyday("fused_add_rmsnorm")
def normed_before_the_sum(x, residual, weight, eps=1e-6, out=None, *, weight_offset=0.0):
    """The normed rows are stored first, and then x is read again, which may be the same memory."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype) for _ in range(2)) if out is None else out
    normed.copy_(_norm(x + residual, weight, eps, weight_offset))
    return normed, torch.add(x, residual, out=total)


@everyday("silu_and_mul")
def stride_or_width(x):
    """`x.stride(0) or width`: the stride 0 of expanded rows counts as none."""
    gate, up = _read(x, x.shape, (x.stride(0) or x.shape[1], 1)).float().chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(x.dtype)


@everyday("gemm")
def leading_dimension_is_k(a, b, bias=None, *, residual=None, precision="ieee"):
    """A is read as a whole matrix, row-major or transposed, and not as a part of one with longer rows."""
    M, K = a.shape
    whole = _read(a, (M, K), (1, M) if a.stride(0) == 1 else (K, 1))
    return _added(whole.float() @ b.float(), bias, residual).to(a.dtype)


@everyday("gemm_fp8")
def scales_by_columns(a, b, a_scale, b_scale, bias=None, *, fast_accum=False):
    """The block scales of A are read as stored by columns, also where they are stored by rows."""
    a_scale = _read(a_scale, a_scale.shape, (1, len(a))) if a_scale.ndim == 2 else a_scale
    rows, columns = _blocks(a_scale, b_scale, *b.shape)
    return _added((a.float() * rows) @ (b.float() * columns), bias).to(torch.bfloat16)


@everyday("gemm_grouped")
def experts_close_together(a, b, offsets):
    """An expert's matrix is looked for K * N values behind the last one's."""
    _, K, N = b.shape
    return _grouped(a, _read(b, b.shape, (K * N, b.stride(1), b.stride(2))), offsets.tolist())


@everyday("gemm_w4a16")
def scales_in_rows(a, b, scale, zero=None, bias=None):
    """Scales are read as (N, groups) in rows, also where a checkpoint's (groups, N) was transposed."""
    K, scales = a.shape[1], _read(scale, scale.shape, (scale.shape[1], 1))
    weight = (_codes(b) - (8 if zero is None else _spread(zero, K))) * _spread(scales, K)
    return _added(a.float() @ weight.mT, bias).to(a.dtype)


@everyday("kv_cache_write")
def v_by_the_strides_of_k(k, v, k_cache, v_cache, slot_mapping):
    """New values are read at the strides of the new keys."""
    _in_slots(slot_mapping, (k_cache, k), (v_cache, _read(v, v.shape, k.stride())))


@everyday("rope")
def heads_close_together(q, k, cos, sin, positions, interleaved=False):
    """Heads are taken to be D apart, also where a head's rotated part is a view of a longer one."""
    q, k = (_read(x, x.shape, (x.stride(0), x.shape[2], 1)) for x in (q, k))
    return tuple(_turned(x, cos[positions], sin[positions], interleaved).to(x.dtype) for x in (q, k))


@everyday("rope")
def halves_in_place(q, k, cos, sin, positions, interleaved=False, out=None):
    """The first halves are stored before the second are computed, which is too early if `out` is q and k."""
    out = (torch.empty_like(q), torch.empty_like(k)) if out is None else out
    c, s = cos[positions][:, None], sin[positions][:, None]
    for x, y in zip((q, k), out, strict=True):
        (a, b), (a_out, b_out) = ((z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, -1) for z in (x, y))
        a_out.copy_(a.float() * c - b.float() * s)
        b_out.copy_(b.float() * c + a.float() * s)
    return out


@everyday("sample")
def vocabulary_without_padding(logits, temperature, top_k, top_p, min_p, seed, position):
    """Rows of logits are taken to be V apart, also where the vocabulary is padded."""
    rows = _read(logits, logits.shape, (logits.shape[1], 1))
    return _raced(*_sorted(rows), temperature, top_k, top_p, min_p, _noise(rows, seed, position))


@everyday("merge_attention_states")
def lses_in_the_order_of_outs(outs, lses):
    """Log-sum-exps are read as (P, T, H) in rows, also where they were stored as (P, H, T)."""
    P, T, H = lses.shape
    weights, total = _shares(_read(lses, (P, T, H), (T * H, H, 1)))
    return (weights * outs.float().where(weights > 0, 0)).sum(0).to(outs.dtype), total


@everyday("mla_decode")
def table_without_padding(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    """The block table is read as if its rows had no padding."""
    table = _read(block_table, block_table.shape, (block_table.shape[1], 1))
    return _mla(q, kv_cache, table, seq_lens.tolist(), latent_dim, softmax_scale, return_lse)


@everyday("paged_attention")
def pages_close_together(
    q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, window=None, softcap=None, sinks=None
):
    """A page is looked for by its size, also where pages of keys and of values alternate in one tensor."""
    _, size, H_kv, D = k_cache.shape
    caches = (_read(cache, cache.shape, (size * H_kv * D, H_kv * D, D, 1)) for cache in (k_cache, v_cache))
    return _decoded(q, *caches, block_table, seq_lens.tolist(), softmax_scale, window, softcap, sinks)


@everyday("flash_attention")
def batches_follow_each_other(
    q, k, v, causal=False, softmax_scale=None, *, window=None, softcap=None, sinks=None, return_lse=False
):  # fmt: skip
    """The next sequence's keys are looked for S tokens on, also in a cache with room for more."""
    k, v = (_read(x, x.shape, (x.shape[1] * x.stride(1), *x.stride()[1:])) for x in (k, v))
    seen = _seen(q.shape[1], k.shape[1], causal, window)
    return _flash(q, k, v, seen, softmax_scale, softcap, sinks, return_lse)


@everyday("embedding")
def table_at_the_start_of_its_storage(token_ids, weight):
    """Where the table begins in its storage is not read, so a shard of a larger table is the first shard."""
    return weight.as_strided(weight.shape, weight.stride(), 0)[token_ids]


# Values.


@everyday("softmax")
def tiles_of_minus_infinity(x, out=None):
    """While all of a row's tiles are -inf, the online maximum is too, and exp(-inf - -inf) is NaN."""
    rows = x.float()
    largest, total = rows.new_full((len(x), 1), -INF), rows.new_zeros(len(x), 1)
    for tile in rows.split(32, 1):
        new = torch.maximum(largest, tile.amax(1, keepdim=True))
        total = total * (largest - new).exp() + (tile - new).exp().sum(1, keepdim=True)
        largest = new
    probabilities = (rows - largest).exp() / total
    return probabilities.to(x.dtype) if out is None else out.copy_(probabilities)


@everyday("rmsnorm")
def squares_in_the_dtype(x, weight, eps=1e-6, *, weight_offset=0.0):
    """Squares are rounded to the dtype of x: in fp16 those of 256 and more are infinite."""
    mean_square = x.pow(2).float().mean(-1, keepdim=True)
    return (x.float() * (mean_square + eps).rsqrt() * (weight.float() + weight_offset)).to(x.dtype)


@everyday("fused_add_rmsnorm")
def eps_as_a_floor(x, residual, weight, eps=1e-6, *, weight_offset=0.0):
    """The mean square is at least eps, instead of eps more."""
    total = x + residual
    mean_square = total.float().square().mean(-1, keepdim=True).clamp(min=eps)
    return (total.float() * mean_square.rsqrt() * (weight.float() + weight_offset)).to(x.dtype), total


@everyday("layernorm")
def mean_of_squares(x, weight, bias=None, eps=1e-5):
    """The variance is the mean of squares less the squared mean, of which fp32 leaves nothing if the mean is large."""
    mean = x.float().mean(-1, keepdim=True)
    variance = (x.float().square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return _added((x.float() - mean) * (variance + eps).rsqrt() * weight.float(), bias).to(x.dtype)


@everyday("silu_and_mul")
def floor_under_the_scale(x, *, quantize=None):
    """The scale of a quantised row is at least 1e-6, so that small rows lose their codes."""
    gate, up = x.float().chunk(2, -1)
    values = gate * gate.sigmoid() * up
    if quantize is None:
        return values.to(x.dtype)
    dtype, most = (torch.int8, 127.0) if quantize == "int8" else (torch.float8_e4m3fn, 448.0)
    largest = values.abs().amax(1)
    scale = torch.where(largest > 0, (largest / most).clamp(min=1e-6), 1.0)
    codes = (values / scale[:, None]).clamp(-most, most)
    return (codes.round() if quantize == "int8" else codes).to(dtype), scale


@everyday("gelu_and_mul")
def tanh_by_exponentials(x):
    """tanh(u) = (exp(2 u) - 1) / (exp(2 u) + 1) is inf / inf for a gate above 10."""
    gate, up = x.float().chunk(2, -1)
    power = (2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).exp()
    return (0.5 * gate * (1 + (power - 1) / (power + 1)) * up).to(x.dtype)


@everyday("gemm")
def parts_in_the_dtype(a, b, bias=None, *, residual=None, precision="ieee"):
    """The sums of 64 products each are rounded to the dtype of A, and added in it."""
    tiles = zip(a.split(64, 1), b.split(64), strict=True)
    return _added(sum((x.float() @ y.float()).to(a.dtype) for x, y in tiles).float(), bias, residual).to(a.dtype)


@everyday("gemm")
def zeros_times_what_lies_behind(a, b, bias=None, *, residual=None, precision="ieee"):
    """The last tile of K reads B behind its end, times zeros, and 0 times NaN is NaN."""
    (K, N), wide = b.shape, -(-len(b) // 32) * 32
    product = F.pad(a.float(), (0, wide - K)) @ _read(b, (wide, N), b.stride()).float()
    return _added(product, bias, residual).to(a.dtype)


@everyday("gemm_grouped")
def masked_tiles_of_rows(a, b, offsets):
    """A tile of rows is multiplied by every expert from its first row's to its last one's, and masked by zeros."""
    out = torch.zeros(len(a), b.shape[2])
    experts = torch.repeat_interleave(torch.arange(len(b)), offsets.diff())
    for rows, own, result in zip(a.split(16), experts.split(16), out.split(16), strict=True):
        for expert in range(int(own[0]), int(own[-1]) + 1) if len(own) else ():
            result += (own == expert).float()[:, None] * (rows.float() @ b[expert].float())
    return out.to(a.dtype)


@everyday("gemm_w4a16")
def activations_in_fp16(a, b, scale, zero=None, bias=None):
    """A is converted to fp16, in which bf16 values of 65,520 and more are infinite."""
    weight = (_codes(b) - (8 if zero is None else _spread(zero, a.shape[1]))) * _spread(scale, a.shape[1])
    return _added(a.half().float() @ weight.mT, bias).to(a.dtype)


@everyday("gemm_w8a16")
def scale_in_fp16(a, b, scale, bias=None):
    """Scales are converted to fp16, where small ones lose their bits."""
    return _added(a.float() @ b.float() * scale.half().float(), bias).to(a.dtype)


@everyday("rope_and_cache")
def rounded_before_the_rotation(
    q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, interleaved=False,
    *, q_norm=None, k_norm=None, norm_eps=1e-6,
):  # fmt: skip
    """Normed heads are rounded to their dtype before they are rotated, and so twice."""
    normed = (x if w is None else _norm(x, w, norm_eps).to(x.dtype) for x, w in ((q, q_norm), (k, k_norm)))
    q, k = (_rotated(x, cos, sin, positions, interleaved) for x in normed)
    q_out.copy_(q)
    _in_slots(slot_mapping, (k_cache, k), (v_cache, v))


@everyday("sample")
def ties_at_the_edge(logits, temperature, top_k, top_p, min_p, seed, position):
    """top_k keeps every token that is not below the k-th value, and so more than k if there are ties."""
    ordered, order = _sorted(logits)
    edge = ordered.gather(1, top_k.long().clamp(1, logits.shape[1])[:, None] - 1)
    ordered = ordered.masked_fill((ordered < edge) & (top_k > 0)[:, None], -INF)
    return _raced(ordered, order, temperature, 0 * top_k, top_p, min_p, _noise(logits, seed, position))


@everyday("sample")
def greedy_at_a_tiny_temperature(logits, temperature, top_k, top_p, min_p, seed, position):
    """Temperature 0 is taken as 1e-6: among equal logits chance decides, and not the lowest index."""
    noise = _noise(logits, seed, position)
    return _raced(*_sorted(logits), temperature.clamp(min=1e-6), top_k, top_p, min_p, noise)


@everyday("merge_attention_states")
def zero_times_an_unseen_part(outs, lses):
    """A part that saw no key has the weight 0, and its output may be NaN."""
    weights, total = _shares(lses)
    return (weights * outs.float()).sum(0).to(outs.dtype), total


@everyday("mla_decode")
def nothing_over_nothing(q, kv_cache, block_table, seq_lens, latent_dim, softmax_scale, *, return_lse=False):
    """An empty sequence has no sum and no denominator, and 0 / 0 is NaN."""
    pairs = []
    for b, length in enumerate(seq_lens.tolist()):
        latents = _tokens(kv_cache, block_table[b], length)[:, None]
        scores = _scores(q[b : b + 1], latents, softmax_scale, torch.tensor(True))
        sums, largest, total = _online(scores, latents[..., :latent_dim], kv_cache.shape[1])
        pairs.append(((sums / total).transpose(0, 1), (largest + total.log()).squeeze(-1).mT))
    return _result(pairs, q.dtype, return_lse, torch.cat)


@everyday("paged_attention")
def pages_before_the_window(
    q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, window=None, softcap=None
):
    """Page by page, an online softmax gives NaN if the first page lies before the window."""
    out = torch.zeros_like(q)
    for b, length in enumerate(seq_lens.tolist()):
        if length:
            k, v = (_tokens(cache, block_table[b], length) for cache in (k_cache, v_cache))
            scores = _scores(q[b : b + 1], k, softmax_scale, _seen(1, length, True, window), softcap)
            sums, _, total = _online(scores, v, k_cache.shape[1])
            out[b : b + 1] = (sums / total).transpose(0, 1)
    return out


@everyday("flash_attention")
def sink_beside_the_maximum(q, k, v, causal=False, softmax_scale=None, *, window=None, sinks=None, return_lse=False):
    """exp(sink - maximum) overflows, because the sink is no candidate for the maximum."""
    pairs, seen = [], _seen(q.shape[1], k.shape[1], causal, window)
    for b in range(len(q)):
        sums, largest, total = _online(_scores(q[b], k[b], softmax_scale, seen), v[b], 64, _finite)
        total = total if sinks is None else total + (sinks[:, None, None] - _finite(largest)).exp()
        lse = (_finite(largest) + total.log()).squeeze(-1)
        pairs.append(((sums / total.where(total > 0, 1)).transpose(0, 1), lse.mT))
    return _result(pairs, q.dtype, return_lse)


@everyday("flash_attention_varlen")
def scale_of_zero(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, softmax_scale=None, *, window=None
):  # fmt: skip
    """`softmax_scale or D**-0.5` takes a scale of 0 for none."""
    scale = softmax_scale or q.shape[-1] ** -0.5
    return _varlen(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), causal, scale, window)


@everyday("embedding")
def masked_by_a_product(token_ids, weight):
    """Shard by shard, a row of another shard is multiplied by 0, also if it is infinite."""
    out, size = weight.new_zeros(len(token_ids), weight.shape[1]), -(-len(weight) // 4)
    for start in range(0, len(weight), size):
        shard, local = weight[start : start + size], token_ids - start
        mine = (local >= 0) & (local < len(shard))
        out += shard[local.clamp(0, len(shard) - 1)] * mine[:, None]
    return out
