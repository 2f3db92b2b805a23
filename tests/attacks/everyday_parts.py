"""What the wrong kernels of `everyday_inputs.py` and `everyday_runs.py` share; no fault is here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from rooflab.kernels.lib.philox import log_exponential, words_of_rows
from rooflab.kernels.registry import register
from rooflab.kernels.sample.naive import kept_of

INF = math.inf


def everyday(op: str, **options: Any) -> Callable[..., Any]:
    """Registers the decorated function, unless `ROOFLAB_ATTACK` names another one."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if fn.__name__ == os.environ.get("ROOFLAB_ATTACK", fn.__name__):
            register(op=op, name=fn.__name__, role="optimized", backend="torch", **options)(fn)
        return fn

    return decorate


def _memory(x):
    """The memory of x from its first element to the end of its storage, as a pointer has it."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))


def _read(x, shape, strides):
    """What lies at these strides from x's first element on; behind the end of the memory, its last value."""
    memory, last = _memory(x), sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last < len(memory):
        return memory.as_strided(shape, strides)
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return memory[places.clamp(max=len(memory) - 1)]


def _norm(x, weight, eps, offset=0.0):
    return x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + offset)


def _added(product, bias, residual=None):
    for addend in (bias, residual):
        product = product if addend is None else product + addend.float()
    return product


def _grouped(a, b, bounds):
    """Rows bounds[e] to bounds[e + 1] of A times matrix e; other rows stay 0."""
    out = a.new_zeros(len(a), b.shape[2])
    for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end > start:
            out[start:end] = a[start:end].float() @ b[expert].float()
    return out


def _codes(b):
    return torch.stack((b & 15, b >> 4), -1).flatten(1).float()


def _spread(scale, K):
    """Scales (N, groups) for each of K values in groups of 128, 64 or 32."""
    group = next(size for size in (128, 64, 32) if -(-K // size) == scale.shape[1])
    return scale.float().repeat_interleave(group, 1)[:, :K]


def _blocks(a_scale, b_scale, K, N):
    """The scales of blocks of 128 for each value; a single scale stays one."""
    if a_scale.ndim < 2:
        return a_scale.clone(), b_scale.clone()
    columns = b_scale.repeat_interleave(128, 0)[:K].repeat_interleave(128, 1)[:, :N]
    return a_scale.repeat_interleave(128, 1)[:, :K], columns


def _turned(x, c, s, interleaved):
    """x (T, heads, R), rotated by cosines and sines (T, R / 2)."""
    first, second = (x[..., ::2].float(), x[..., 1::2].float()) if interleaved else x.float().chunk(2, -1)
    pair = first * c[:, None] - second * s[:, None], second * c[:, None] + first * s[:, None]
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def _rotated(x, cos, sin, positions, interleaved):
    """x (T, heads, D) in fp32, of which the first 2 R values of a head are rotated by tables (max_position, R)."""
    R = 2 * cos.shape[1]
    return torch.cat((_turned(x[..., :R], cos[positions], sin[positions], interleaved), x[..., R:].float()), -1)


def _in_slots(slot_mapping, *pairs):
    """Stores new rows in their slots of caches."""
    kept = slot_mapping >= 0
    for cache, new in pairs:
        cache.flatten(0, 1)[slot_mapping[kept]] = new[kept].to(cache.dtype)


def _seen(T, S, causal, window=None):
    """(T, S): which keys each query sees."""
    last, key = torch.arange(T)[:, None] + S - T, torch.arange(S)
    seen = key <= last if causal else torch.ones(T, S, dtype=torch.bool)
    return seen if window is None else seen & (key > last - window)


def _scores(q, k, softmax_scale, seen, softcap=None):
    """(H, T, S) scores of q (T, H, D) and k (S, H_kv, D); -inf for a key that is not seen."""
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).permute(1, 2, 0)
    scores = q.float().transpose(0, 1) @ keys * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return scores.masked_fill(~seen, -INF)


def _values(v, H):
    return v.float().repeat_interleave(H // v.shape[1], 1).transpose(0, 1)


def _mixed(weights, values):
    """weights @ values; what is not finite counts for nothing under a weight of 0."""
    sums = weights @ values.nan_to_num(0.0, 0.0, 0.0)
    for special in () if values.isfinite().all() else (INF, -INF, math.nan):
        there = values.isnan() if math.isnan(special) else values == special
        sums = sums + torch.where((weights > 0).float() @ there.float() > 0, special, 0.0)
    return sums


def _averaged(scores, v, sinks=None):
    """The output (T, H, D) and the log-sum-exp (T, H) of scores (H, T, S)."""
    lse = torch.logsumexp(scores, -1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    weights = (scores - lse.masked_fill(lse == -INF, 0)[..., None]).exp()
    return _mixed(weights, _values(v, len(scores))).transpose(0, 1), lse.mT


def _finite(largest):
    return largest.masked_fill(largest == -INF, 0)


def _online(scores, v, step, safe=lambda largest: largest):
    """An online softmax over tiles of keys: sums (H, T, D) that are not divided yet, the maximum, the denominator.

    safe: what is subtracted from scores instead of their maximum, which is -inf where no key was seen yet.
    """
    H, T, _ = scores.shape
    largest, total, sums = torch.full((H, T, 1), -INF), torch.zeros(H, T, 1), torch.zeros(H, T, v.shape[-1])
    tiles = zip(scores.split(step, -1), _values(v, H).split(step, 1), strict=True) if len(v) else ()
    for tile, values in tiles:
        new = torch.maximum(largest, tile.amax(-1, keepdim=True))
        weights, rescale = (tile - safe(new)).exp(), (largest - safe(new)).exp()
        total, largest = total * rescale + weights.sum(-1, keepdim=True), new
        sums = sums * rescale + _mixed(weights, values)
    return sums, largest, total


def _result(pairs, dtype, return_lse, join=torch.stack):
    """The outputs of sequences, and with `return_lse` their log-sum-exps."""
    out, lse = (join(part) for part in zip(*pairs, strict=True))
    return (out.to(dtype), lse) if return_lse else out.to(dtype)


def _flash(q, k, v, seen, softmax_scale, softcap=None, sinks=None, return_lse=False):
    scores = (_scores(*each, softmax_scale, seen, softcap) for each in zip(q, k, strict=True))
    return _result([_averaged(*each, sinks) for each in zip(scores, v, strict=True)], q.dtype, return_lse)


def _varlen(q, k, v, starts, others, causal, softmax_scale, window):
    out = torch.zeros_like(q)
    for a, b, c, d in zip(starts, starts[1:], others, others[1:], strict=False):
        out[a:b] = _averaged(_scores(q[a:b], k[c:d], softmax_scale, _seen(b - a, d - c, causal, window)), v[c:d])[0]
    return out


def _tokens(cache, pages, length):
    """A sequence's tokens in order; a page outside of the cache is another one, because a kernel cannot raise."""
    at = torch.arange(length)
    return cache[pages.long().clamp(0, len(cache) - 1)[at // cache.shape[1]], at % cache.shape[1]]


def _decoded(q, k_cache, v_cache, table, lengths, softmax_scale, window=None, softcap=None, sinks=None):
    """One query of each sequence over its cached tokens."""
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths):
        k, v = (_tokens(cache, table[b], length) for cache in (k_cache, v_cache))
        scores = _scores(q[b : b + 1], k, softmax_scale, _seen(1, length, True, window), softcap)
        out[b : b + 1] = _averaged(scores, v, sinks)[0]
    return out


def _mla(q, kv_cache, table, lengths, latent_dim, softmax_scale, return_lse):
    pairs = []
    for b, length in enumerate(lengths):
        latents = _tokens(kv_cache, table[b], length)[:, None]
        scores = _scores(q[b : b + 1], latents, softmax_scale, torch.tensor(True))
        pairs.append(_averaged(scores, latents[..., :latent_dim]))
    return _result(pairs, q.dtype, return_lse, torch.cat)


def _shares(lses):
    """The weight of each part (P, T, H, 1), and the log-sum-exp of all."""
    total = lses.logsumexp(0)
    return (lses - _finite(total)).exp()[..., None], total


def _sorted(logits):
    return torch.sort(logits.float(), dim=-1, descending=True, stable=True)


def _noise(logits, seed, position):
    return log_exponential(words_of_rows(seed, position, logits.shape[1]))


def _raced(ordered, order, temperature, top_k, top_p, min_p, noise):
    """The tokens that win the race among those that are kept of a sorted row."""
    kept, scores = kept_of(ordered, temperature, top_k, top_p, min_p)
    race = torch.full_like(noise, -INF).scatter_(1, order, scores.masked_fill(~kept, -INF))
    return torch.where(temperature > 0, (race - noise).argmax(-1), order[:, 0])
