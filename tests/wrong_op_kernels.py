"""Kernels that are wrong on purpose in ways of their op: masks, slots, offsets past 2**31, and Triton's pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from tiny_ops import ATTEND, OFFSETS, SCALE, STORE, right, wrong


@right(OFFSETS)
def in_int64(blocks, row_bytes):
    return blocks * row_bytes


@wrong(OFFSETS, "first data: offset:")
def in_int32(blocks, row_bytes):
    return (blocks.int() * row_bytes).long()


@wrong(OFFSETS, "expected dtype torch.int64, got torch.int32")
def returns_int32(blocks, row_bytes):
    return (blocks * row_bytes).int()


def _attend(q, k, v, hidden, softmax_scale):
    """Attention in fp64 with the keys of `hidden` (T, S) left out."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _hidden(q, k, causal, shift=0):
    T, S = q.shape[1], k.shape[1]
    after = torch.arange(S) > torch.arange(T)[:, None] + S - T + shift
    return after if causal else torch.zeros_like(after)


@right(ATTEND)
def attends(q, k, v, causal=False, softmax_scale=None):
    return _attend(q, k, v, _hidden(q, k, causal), softmax_scale).to(q.dtype).contiguous()


@wrong(ATTEND, "first data: out:")
def sees_one_key_too_many(q, k, v, causal=False, softmax_scale=None):
    return _attend(q, k, v, _hidden(q, k, causal, 1), softmax_scale).to(q.dtype)


@wrong(ATTEND, "first data: out:")
def sees_one_key_too_few(q, k, v, causal=False, softmax_scale=None):
    return _attend(q, k, v, _hidden(q, k, causal, -1), softmax_scale).to(q.dtype)


@wrong(ATTEND, "first data: out:")
def aligned_top_left(q, k, v, causal=False, softmax_scale=None):
    return _attend(q, k, v, _hidden(q, k, causal, q.shape[1] - k.shape[1]), softmax_scale).to(q.dtype)


def drops_the_last_key(q, k, v, causal=False, softmax_scale=None):
    """Among 16384 keys that weigh the same this is within any honest tolerance; the planted key shows it."""
    hidden = _hidden(q, k, causal)
    hidden[:, -1] = True
    return _attend(q, k, v, hidden, softmax_scale).to(q.dtype)


@right(STORE)
def stores(k, v, k_cache, v_cache, slot_mapping):
    for new, cache in ((k, k_cache), (v, v_cache)):
        for token in range(k.shape[0]):
            slot = int(slot_mapping[token])
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


@wrong(STORE, "first data: k_cache:")
def stores_skipped_tokens_last(k, v, k_cache, v_cache, slot_mapping):
    for new, cache in ((k, k_cache), (v, v_cache)):
        for token, slot in enumerate(slot_mapping.tolist()):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


@wrong(STORE, "k_cache: memory outside it was written")
def stores_skipped_tokens_before_the_cache(k, v, k_cache, v_cache, slot_mapping):
    for new, cache in ((k, k_cache), (v, v_cache)):
        row = cache.stride(1)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]
            else:
                cache.as_strided((row,), (1,), cache.storage_offset() - row)[: new[token].numel()] = 0


@wrong(STORE, "slot_mapping: was changed")
def consumes_its_slots(k, v, k_cache, v_cache, slot_mapping):
    stores(k, v, k_cache, v_cache, slot_mapping)
    slot_mapping.fill_(-1)


@wrong(STORE, "v_cache: ")
def forgets_v(k, v, k_cache, v_cache, slot_mapping):
    stores(k, k, k_cache, k_cache, slot_mapping)


@wrong(STORE, "expected None")
def returns_the_caches(k, v, k_cache, v_cache, slot_mapping):
    stores(k, v, k_cache, v_cache, slot_mapping)
    return k_cache, v_cache


@triton.jit
def _scale_kernel(x_ptr, y_ptr, rows, x_stride, y_stride, factor, MASKED: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    mask = (columns < 8) | (not MASKED)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    tl.store(y_ptr + row * y_stride + columns, x * factor, mask=mask)


def _launch(x, factor, out, masked):
    out = torch.empty_like(x) if out is None else out
    _scale_kernel[(len(x),)](x, out, len(x), x.stride(0), out.stride(0), factor, MASKED=masked, WIDTH=16)
    return out


@right(SCALE, backend="triton")
def in_triton(x, factor=1.0, out=None):
    return _launch(x, factor, out, True)


@wrong(SCALE, "first data again, into out: out (y): memory outside it was written", backend="triton")
def forgets_its_mask_into_out(x, factor=1.0, out=None):
    return _launch(x, factor, out, out is None)
