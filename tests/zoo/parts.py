"""Right formulas that several kernels of the zoo share; no fault is in this file."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

INF = math.inf


def memory(x):
    """The memory of x from its first element to the end of its storage, as a pointer has it."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))


def read(x, *strides, shape=None):
    """What lies at these strides from x's first element on; behind the end of the memory, its last value."""
    own, shape = memory(x), shape or x.shape
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last < len(own):
        return own.as_strided(shape, strides)
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return own[places.clamp(max=len(own) - 1)]


def close(x):
    """What lies there if rows follow one another."""
    return read(x, *(math.prod(x.shape[dim + 1 :]) for dim in range(x.ndim)))


def added(product, *addends):
    """The product and all addends that are not None."""
    return functools.reduce(lambda total, each: total if each is None else total + each.float(), addends, product)


def normed(x, weight, eps=1e-6, offset=0.0):
    """RMSNorm in fp32."""
    return x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + offset)


def gated(x):
    """silu(gate) * up in fp32."""
    gate, up = x.float().chunk(2, -1)
    return gate * gate.sigmoid() * up


def silu_and_mul(x):
    return gated(x).to(x.dtype)


def gelu_and_mul(x):
    gate, up = x.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Heads x (T, heads, R) turned by cos and sin (T, R/2)."""
    c, s, half = cos[:, None], sin[:, None], x.shape[2] // 2
    first, second = x[:, :, :half].float(), x[:, :, half:].float()
    if interleaved:
        first, second = x[:, :, 0::2].float(), x[:, :, 1::2].float()
    pair = first * c - second * s, second * c + first * s
    return (torch.stack(pair, -1).flatten(2) if interleaved else torch.cat(pair, -1)).to(x.dtype)


def visible(T, S, causal):
    """(T, S): which keys each query sees."""
    return torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else torch.ones(T, S, dtype=torch.bool)


def finite(largest):
    return largest.masked_fill(largest == -INF, 0)


def shares(lses):
    """The weight of each part (P, T, H, 1), and the log-sum-exp of all; +inf is what -inf is, a part without keys."""
    lses = lses.masked_fill(lses == INF, -INF)
    total = lses.logsumexp(0)
    return (lses - finite(total)).exp()[..., None], total
