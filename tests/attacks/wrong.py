"""Sixty kernels that are right on ordinary inputs and wrong in one corner each, to measure the checker.

They were written without a look at what the checker draws, and they stay so: mend the checker, not this file.  A name
says the corner, and the docstring what is wrong there.  Each is the op's naive kernel (or, where that one is Triton,
the formula in torch), with its arguments or its result changed.  `tests/test_attacks.py` checks each of them; by hand,
`ROOFLAB_ATTACK=bias_along_rows rooflab check gemm --kernel tests/attacks/wrong.py` registers and checks one.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from rooflab.kernels.registry import get_kernel, get_op, register
from rooflab.reference.spec import as_tuple

# The formulas in fp64, for ops whose naive kernel is a Triton kernel.
_IN_TORCH = {
    "gemm": lambda **a: get_op("gemm").reference(**a).to(a["a"].dtype),
    "embedding": get_op("embedding").reference,
}


def wrong(op: str) -> Callable[..., Any]:
    """Registers `change(a, right)` as a kernel of `op`: `a` has the arguments as attributes, and `right(...)` is the
    right result, with the given arguments replaced."""
    naive, signature = get_kernel(op, "naive"), inspect.Signature(get_op(op).parameters)
    formula = _IN_TORCH.get(op, naive.fn)

    def decorate(change: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*positional: Any, **named: Any) -> Any:
            bound = signature.bind(*positional, **named)
            bound.apply_defaults()
            a = bound.arguments
            return change(SimpleNamespace(**a), lambda **changes: formula(**{**a, **changes}))

        kernel.__signature__ = signature  # type: ignore[attr-defined]
        if (name := change.__name__) == os.environ.get("ROOFLAB_ATTACK", name):
            register(op=op, name=name, role="optimized", backend="torch", unsupported=naive.unsupported)(kernel)
        return change

    return decorate


# Inputs that no case has: scales, tables, padding, settings, ties, NaN.


@wrong("flash_attention")
def scale_is_the_default(a, right):
    """The caller's softmax scale is not read."""
    return right(softmax_scale=None)


@wrong("flash_attention")
def rows_below_minus_1e4(a, right):
    """The largest score begins at -1e4, not -inf: rows whose visible scores are all below it give 0."""
    result, lse = right(), right(return_lse=True, sinks=None)[1]
    as_tuple(result)[0][(lse < -1e4) & lse.isfinite()] = 0
    return result


@wrong("flash_attention_varlen")
def scale_is_a_power_of_2(a, right):
    """A scale that the caller gives is rounded to a power of two."""
    return right(softmax_scale=a.softmax_scale and float(torch.tensor(a.softmax_scale).log2().round().exp2()))


@wrong("rope")
def knows_two_thetas(a, right):
    """Tables of a theta above 600,000 are replaced by those of 500,000."""
    rows, half = a.cos.shape
    last = float(torch.atan2(a.sin[1, -1], a.cos[1, -1])) if rows > 1 and half > 1 else 0.0
    if not 0 < last < 6e5 ** (1 / half - 1):
        return right()
    angles = torch.arange(rows)[:, None] * 5e5 ** (-torch.arange(half).double() / half)
    return right(cos=angles.cos().float(), sin=angles.sin().float())


@wrong("rope")
@wrong("rope_and_cache")
def positions_of_20_bits(a, right):
    """Positions from 2**20 on begin again at 0."""
    return right(positions=a.positions % 2**20)


@wrong("rope_and_cache")
def tables_of_length_one(a, right):
    """Tables that also scale, as YaRN's do, are divided by their length."""
    length = torch.hypot(a.cos, a.sin)
    length = torch.where((length - 1).abs() < 1e-3, 1, length)
    return right(cos=a.cos / length, sin=a.sin / length)


@wrong("silu_and_mul")
def gate_above_88(a, right):
    """silu is g e^g / (1 + e^g), which is inf / inf for a large gate."""
    gate = a.x[:, : a.x.shape[1] // 2]
    return right().masked_fill(gate > 88, torch.nan)


@wrong("gemm_w8a16")
def code_minus_128(a, right):
    """The code -128, which has no sign and magnitude in seven bits, counts as 0."""
    return right(b=torch.where(a.b == -128, torch.zeros_like(a.b), a.b))


@wrong("merge_attention_states")
def parts_below_minus_1e4(a, right):
    """The largest log-sum-exp begins at -1e4: rows whose parts all lie below it give 0."""
    out, lse = right()
    out[(lse < -1e4) & lse.isfinite()] = 0
    return out, lse


@wrong("merge_attention_states")
def nan_of_an_empty_later_part(a, right):
    """The output of a part that saw no key is ignored only in part 0; elsewhere 0 times its NaN is added."""
    out, lse = right()
    empty = (a.lses[1:] == -torch.inf)[..., None] & a.outs[1:].isnan()
    out[empty.any(0)] = torch.nan
    return out, lse


@wrong("sample")
def top_p_of_row_0(a, right):
    """All rows of the batch have the top_p of the first."""
    return right(top_p=a.top_p[:1].expand(len(a.top_p)).contiguous())


@wrong("sample")
def greedy_only_if_all_are(a, right):
    """A greedy row among rows that are drawn is drawn too, at temperature 1."""
    greedy = a.temperature == 0
    return right() if greedy.all() else right(temperature=torch.where(greedy, 1.0, a.temperature))


@wrong("sample")
def last_of_greedy_ties(a, right):
    """A greedy row whose highest logit stands twice gives the last place."""
    last = a.logits.shape[1] - 1 - a.logits.float().flip(1).argmax(1)
    return torch.where(a.temperature == 0, last, right())


@wrong("sample")
def nan_row_gives_minus_1(a, right):
    """A row with a NaN gives the token -1, which no vocabulary has."""
    return right().masked_fill(a.logits.isnan().any(1), -1)


@wrong("sample")
def logits_below_minus_1e4(a, right):
    """The highest logit begins at -1e4: a row that lies below it gives the token 0."""
    top = a.logits.float().amax(1)
    return right().masked_fill((top < -1e4) & top.isfinite(), 0)


def _entry_behind(table, lengths, block_size):
    """The number of each sequence's pages, and the table's entry behind them (-1: none)."""
    pages = -(-lengths.long() // block_size)
    padded = torch.cat((table, torch.full_like(lengths, -1)[:, None]), 1)
    return pages, padded.gather(1, pages[:, None])[:, 0]


@wrong("paged_attention")
def padding_is_a_valid_page(a, right):
    """The sequence ends at the first entry that is no page: a valid page behind it is attended to."""
    pages, behind = _entry_behind(a.block_table, a.seq_lens, a.k_cache.shape[1])
    valid = (behind >= 0) & (behind < len(a.k_cache)) & (pages > 0)
    return right(seq_lens=torch.where(valid, (pages + 1) * a.k_cache.shape[1], a.seq_lens).int())


@wrong("paged_attention")
def shared_pages(a, right):
    """A page that an earlier sequence has too is read one page further on."""
    table, seen = a.block_table.clone(), set()
    for row, used in zip(table, (-(-a.seq_lens // a.k_cache.shape[1])).tolist(), strict=True):
        own = row[:used].tolist()
        row[:used] = torch.tensor([(page + (page in seen)) % len(a.k_cache) for page in own], dtype=torch.int32)
        seen |= set(own)
    return right(block_table=table)


@wrong("mla_decode")
def padding_is_page_0(a, right):
    """Padding with page 0 is attended to."""
    pages, behind = _entry_behind(a.block_table, a.seq_lens, a.kv_cache.shape[1])
    return right(seq_lens=torch.where((behind == 0) & (pages > 0), (pages + 1) * a.kv_cache.shape[1], a.seq_lens).int())


# Crossings that no case has: two options, or an option and a size.


@wrong("gemm")
def residual_needs_a_bias(a, right):
    """Without a bias, the residual is not added."""
    return right(residual=None if a.bias is None else a.residual)


@wrong("gemm")
def bias_along_rows(a, right):
    """Where M = N, the bias is added along the rows."""
    square = a.bias is not None and a.a.shape[0] == a.b.shape[1]
    return right(bias=a.bias[:, None] if square else a.bias)


@wrong("gemm")
def square_nn(a, right):
    """Where both operands are square and row-major, b is taken for its transpose."""
    square = a.a.shape == a.b.shape == a.b.mT.shape and a.a.stride() == a.b.stride() == (len(a.b), 1)
    return right(b=a.b.mT if square else a.b)


@wrong("gemm_w4a16")
def more_than_64_groups(a, right):
    """All groups from the 64th on have the scale of the 64th."""
    return right(scale=a.scale[:, torch.arange(a.scale.shape[1]).clamp(max=63)])


@wrong("gemm_w4a16")
def bias_with_zero_points(a, right):
    """With zero points, the bias is not added."""
    return right(bias=a.bias if a.zero is None else None)


@wrong("fused_add_rmsnorm")
def weight_along_rows(a, right):
    """Where T = H, the weight multiplies along the rows."""
    if a.x.shape[0] != a.x.shape[1]:
        return right()
    normed, added = right(weight=torch.ones_like(a.weight))
    return normed * a.weight[:, None], added


@wrong("rope_and_cache")
def interleaved_and_partial(a, right):
    """Where only a part of each head turns, `interleaved` is not read."""
    return right(interleaved=a.interleaved and 2 * a.cos.shape[1] == a.q.shape[2])


@wrong("flash_attention")
def groups_of_5(a, right):
    """With two or more KV heads and five or more queries per head, head h reads KV head h % H_kv."""
    H, H_kv = a.q.shape[2], a.k.shape[2]
    if H_kv < 2 or H < 5 * H_kv or a.k_scale is not None:
        return right()
    heads = torch.arange(H) % H_kv
    return right(k=a.k[:, :, heads], v=a.v[:, :, heads])


@wrong("flash_attention")
def causal_in_three_batches(a, right):
    """Only the first three sequences of a batch are causal."""
    result = right()
    if a.causal:
        for masked, free in zip(as_tuple(result), as_tuple(right(causal=False, window=None)), strict=True):
            masked[3:] = free[3:]
    return result


@wrong("flash_attention")
def window_above_64(a, right):
    """A window above 64 counts as 64."""
    return right(window=a.window and min(a.window, 64))


@wrong("flash_attention")
def top_left_on_whole_tiles(a, right):
    """Where T is a multiple of 64 and T < S, the causal mask is aligned at the top left."""
    T, S = a.q.shape[1], a.k.shape[1]
    aligned = a.causal and 0 < T < S and T % 64 == 0
    return right(k=a.k[:, :T], v=a.v[:, :T]) if aligned else right()


@wrong("flash_attention")
def softcap_with_window(a, right):
    """With a window, the soft cap is not read."""
    return right(softcap=a.softcap if a.window is None else None)


@wrong("flash_attention_varlen")
def lse_without_sinks(a, right):
    """The log-sum-exp that is returned lacks the sinks; the output has them."""
    return (right()[0], right(sinks=None)[1]) if a.return_lse else right()


@wrong("paged_attention")
def page_size_not_a_power_of_2(a, right):
    """In pages of another size than a power of two, a token's key is that of the token before it."""
    size = a.k_cache.shape[1]
    return right(k_cache=a.k_cache.roll(1, 1)) if size & (size - 1) else right()


@wrong("paged_attention")
def sequence_without_queries(a, right):
    """A sequence behind one without queries reads that one's pages and length."""
    if a.cu_seqlens_q is None:
        return right()
    queries = a.cu_seqlens_q.diff().tolist()
    of = [b - 1 if b and not queries[b - 1] else b for b in range(len(queries))]
    return right(block_table=a.block_table[of], seq_lens=a.seq_lens[of])


@wrong("mla_decode")
def pages_above_64(a, right):
    """In pages of more than 64 tokens, the 65th is read as the first again."""
    return right(kv_cache=a.kv_cache[:, torch.arange(a.kv_cache.shape[1]) % 64])


# Sizes that no case has: ragged, or beyond the width of an index or a grid.


@wrong("gemm")
@wrong("gemm_silu_and_mul")
def ragged_k_beyond_256(a, right):
    """From K = 257 on, the last partial tile of 32 along K is left out."""
    K = a.b.shape[0]
    K = K // 32 * 32 if K > 256 else K
    return right(a=a.a[:, :K], b=a.b[:K])


@wrong("gemm_grouped")
def ragged_expert_beyond_256(a, right):
    """The last partial tile of 64 rows of an expert with more than 256 rows is 0."""
    out = right()
    for start, end in zip(a.offsets[:-1].tolist(), a.offsets[1:].tolist(), strict=True):
        if end - start > 256:
            out[end - (end - start) % 64 : end] = 0
    return out


@wrong("gemm_w8a16")
def scale_index_of_8_bits(a, right):
    """Column 256 has the scale of column 0."""
    return right(scale=a.scale[torch.arange(len(a.scale)) % 256])


@wrong("rmsnorm")
def ragged_h_beyond_1024(a, right):
    """From H = 1025 on, the mean square leaves out the last partial tile of 1,024."""
    H = a.x.shape[1]
    if H <= 1024 or H % 1024 == 0:
        return right()
    squares = a.x.float().square()
    seen, whole = squares[:, : H // 1024 * 1024].sum(1, keepdim=True) / H, squares.mean(1, keepdim=True)
    return (right().float() * ((whole + a.eps) / (seen + a.eps)).sqrt()).to(a.x.dtype)


@wrong("rmsnorm")
@wrong("silu_and_mul")
def rows_beyond_65535(a, right):
    """A grid's second dimension ends at 65,535: the rows behind it are 0."""
    out = right()
    out[65535:] = 0
    return out


@wrong("fused_add_rmsnorm")
def ragged_residual_beyond_512(a, right):
    """From H = 513 on, the last partial vector of eight of the new residual is the old one."""
    normed, added = right()
    end = a.x.shape[1] // 8 * 8
    if end >= 512:
        added[:, end:] = a.residual[:, end:]
    return normed, added


@wrong("kv_cache_write")
def slots_of_16_bits(a, right):
    """Slots from 65,536 on are not written."""
    return right(slot_mapping=a.slot_mapping.masked_fill(a.slot_mapping >= 2**16, -1))


@wrong("merge_attention_states")
def parts_beyond_32(a, right):
    """A warp merges 32 parts; those behind are left out."""
    return right(outs=a.outs[:32], lses=a.lses[:32])


@wrong("embedding")
def ids_of_16_bits(a, right):
    """Token 65,536 has the row of token 0."""
    return right(token_ids=a.token_ids % 2**16)


@wrong("sample")
def ragged_vocabulary_beyond_65536(a, right):
    """From V = 65,537 on, the last partial block of 1,024 logits is not read."""
    V = a.logits.shape[1]
    return right(logits=a.logits.index_fill(1, torch.arange(V // 1024 * 1024 if V > 2**16 else V, V), -torch.inf))


@wrong("flash_attention_varlen")
def more_than_64_sequences(a, right):
    """The rows of the 65th sequence and those behind are 0."""
    result, begin = right(), int(a.cu_seqlens_q[:65][-1])
    for part in as_tuple(result) if len(a.cu_seqlens_q) > 65 else ():
        part[begin:] = 0
    return result


@wrong("paged_attention")
def ragged_length_beyond_2048(a, right):
    """From 2,049 tokens on, the last partial tile of 256 is left out."""
    return right(seq_lens=torch.where(a.seq_lens > 2048, a.seq_lens // 256 * 256, a.seq_lens))


# Other corners: empty sizes, strides and offsets, the last of something, tile edges, constants that were built in.


@wrong("gemm")
def empty_k(a, right):
    """With K = 0 the result is 0, without the bias and the residual."""
    return right() if a.b.shape[0] else right(bias=None, residual=None)


@wrong("gemm")
def no_stride_of_b_is_1(a, right):
    """A b that is contiguous in no direction is read one row off."""
    return right() if 1 in a.b.stride() else right(b=a.b.roll(1, 0))


@wrong("gemm_silu_and_mul")
def one_row_nn(a, right):
    """For one row and a row-major b, up's columns are taken for gate's."""
    I = a.b.shape[1] // 2
    return right(b=a.b.roll(I, 1)) if len(a.a) == 1 and a.b.stride(1) == 1 else right()


@wrong("gemm_grouped")
def empty_expert_between(a, right):
    """The rows behind an empty expert, if rows stand before it too, are multiplied by the empty one's matrix."""
    b, bounds = a.b.clone(), a.offsets.tolist()
    for expert in range(1, len(b) - 1):
        if 0 < bounds[expert] == bounds[expert + 1] < bounds[expert + 2]:
            b[expert + 1] = a.b[expert]
    return right(b=b)


@wrong("rmsnorm")
def eps_is_built_in(a, right):
    """eps is always 1e-6."""
    return right(eps=1e-6)


@wrong("rmsnorm")
def offset_in_storage(a, right):
    """A view that begins inside its storage is read from the storage's first element."""
    return right(x=a.x.as_strided(a.x.shape, a.x.stride(), 0))


@wrong("rope")
def odd_number_of_pairs(a, right):
    """Where a head has an odd number of pairs, the last is not turned."""
    half = a.cos.shape[1]
    last = [2 * half - 2, 2 * half - 1] if a.interleaved else [half - 1, 2 * half - 1]
    results = right()
    for x, result in zip((a.q, a.k), results, strict=True):
        if half % 2:
            result[..., last] = x[..., last]
    return results


@wrong("kv_cache_write")
def last_slot(a, right):
    """The last slot of the cache is not written."""
    last = a.k_cache.shape[0] * a.k_cache.shape[1] - 1
    return right(slot_mapping=a.slot_mapping.masked_fill(a.slot_mapping == last, -1))


@wrong("embedding")
def last_row_of_the_table(a, right):
    """The last token of the vocabulary has the row before it."""
    return right(token_ids=a.token_ids.clamp(max=max(len(a.weight) - 2, 0)))


@wrong("sample")
def top_p_before_top_k(a, right):
    """top_p takes its share of all tokens, not of those that top_k left."""
    logits = a.logits.float().clone()
    for row, k, p, t in zip(logits, a.top_k.tolist(), a.top_p.tolist(), a.temperature.tolist(), strict=True):
        if k and p < 1 and t > 0:
            law, order = (row / t).softmax(0).sort(descending=True, stable=True)
            row[order[law.double().cumsum(0) - law >= p]] = -torch.inf
    return right(logits=logits, top_p=torch.where(a.top_k > 0, 1.0, a.top_p))


@wrong("flash_attention")
def key_127(a, right):
    """Without a causal mask and with more than 128 keys, the last key of the first tile is masked."""
    if a.causal or a.k.shape[1] <= 128:
        return right()
    seen = [key for key in range(a.k.shape[1]) if key != 127]
    return right(k=a.k[:, seen], v=a.v[:, seen])
