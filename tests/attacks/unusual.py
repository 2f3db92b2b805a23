"""Fifteen right kernels that are written in unusual ways, and that a too strict checker would refuse.

`tests/test_attacks.py` checks each of them.  By hand,
`ROOFLAB_ATTACK=split_k_backwards rooflab check gemm --kernel tests/attacks/unusual.py` registers and checks one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rooflab.kernels.registry import register


def unusual(op: str, name: str = "", **options: Any) -> Callable[..., Any]:
    """Registers the decorated function, unless `ROOFLAB_ATTACK` names another one."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if (own := name or fn.__name__) == os.environ.get("ROOFLAB_ATTACK", own):
            register(op=op, name=own, role="optimized", backend="torch", **options)(fn)
        return fn

    return decorate


def _norm(x, weight, eps=1e-6):
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def _silu(x):
    gate, up = x.float().chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(x.dtype)


# Traced at the first call and guarded; traced and compiled to C++; results that autograd must not touch.
unusual("rmsnorm", "compiled_eager")(torch.compile(_norm, backend="eager"))
unusual("silu_and_mul", "compiled_inductor")(torch.compile(_silu, dynamic=True))
unusual("rmsnorm", "inference_mode")(torch.inference_mode()(_norm))


@unusual("rmsnorm")
def numpy_views(x, weight, eps=1e-6):
    """NumPy computes on views of torch's memory, and torch returns a view of NumPy's."""
    x32, w32 = x.detach().float().numpy(), weight.detach().float().numpy()
    return torch.from_numpy(x32 / ((x32**2).mean(-1, keepdims=True) + x32.dtype.type(eps)) ** 0.5 * w32).to(x.dtype)


@unusual("rmsnorm")
def in_float64(x, weight, eps=1e-6):
    """More exact than it needs to be: the bits may be the oracle's own."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(x.dtype)


@unusual("rmsnorm")
def row_by_row(x, weight, eps=1e-6):
    """`vmap` of a function of one row."""
    return torch.vmap(lambda row: _norm(row, weight, eps))(x) if len(x) else torch.empty_like(x)


_scratch: dict[Any, torch.Tensor] = {}


@unusual("silu_and_mul")
def scratch_is_kept(x):
    """Works in place, in memory that stays between the calls; only a copy is returned."""
    gate, up = x.chunk(2, -1)
    buffer = _scratch.setdefault(gate.shape, torch.empty(gate.shape)).copy_(gate)
    return buffer.neg_().exp_().add_(1).reciprocal_().mul_(gate).mul_(up).to(x.dtype, copy=True)


@unusual("silu_and_mul")
def threads_that_are_joined(x):
    """Four threads write tiles of the result, and are gone before it is returned."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda rows, part: rows.copy_(_silu(part)), out.split(32), x.split(32)))
    return out


def _add(product, *addends):
    for addend in addends:
        product = product if addend is None else product + addend.float()
    return product


@unusual("gemm")
def split_k_backwards(a, b, bias=None, *, residual=None, precision="ieee"):
    """Parts of K, added from the last to the first."""
    parts = [left.float() @ right.float() for left, right in zip(a.split(64, 1), b.split(64), strict=True)]
    return _add(sum(reversed(parts[:-1]), parts[-1]), bias, residual).to(a.dtype)


@unusual("gemm", nondeterministic="the parts of K are added in the order of their arrival")
def atomics(a, b, bias=None, *, residual=None, precision="ieee"):
    """Parts of K in another order at every call, as atomic additions come; it says so."""
    parts = [left.float() @ right.float() for left, right in zip(a.split(16, 1), b.split(16), strict=True)]
    return _add(sum(parts[i] for i in torch.randperm(len(parts))), bias, residual).to(a.dtype)


@unusual("gemm")
def out_of_empty(a, b, bias=None, out=None, *, residual=None, precision="ieee"):
    """Memory without values, written by `out=`."""
    product = torch.mm(a.float(), b.float(), out=torch.empty(len(a), b.shape[1]))
    out = torch.empty(product.shape, dtype=a.dtype) if out is None else out
    return out.copy_(_add(product, bias, residual))


@unusual("gemm")
def stream_of_tiles(a, b, bias=None, *, residual=None, precision="ieee"):
    """A generator gives tiles of a transposed product, which lies transposed in memory."""
    tiles = (torch.einsum("kn,mk->nm", b.float(), rows.float()) for rows in a.split(48))
    return _add(torch.cat(list(tiles), 1).mT, bias, residual).to(a.dtype).contiguous()


@unusual("gemm_w8a16", prepare=lambda b: b.mT.contiguous().to(torch.bfloat16))
def packed_once(a, b, scale, bias=None):
    """`prepare` stores the weight as (N, K) in bf16, and the kernel takes only that."""
    return _add(a.float() @ b.mT.float() * scale.float(), bias).to(a.dtype)


@unusual("merge_attention_states")
def by_einsum(outs, lses):
    """One contraction over the parts; a part that saw no key is replaced before."""
    total = lses.logsumexp(0)
    weights = (lses - total.masked_fill(total == -torch.inf, 0)).exp()
    seen = outs.float().where((lses > -torch.inf)[..., None], 0)
    return torch.einsum("pth,pthd->thd", weights, seen).to(outs.dtype), total


@unusual("rope")
def by_complex_numbers(q, k, cos, sin, positions, interleaved=False):
    """A turn is a product of complex numbers, in buffers that are not contiguous."""
    turn = torch.complex(cos, sin)[positions][:, None]
    pairs = (lambda x: x.unflatten(-1, (-1, 2))) if interleaved else (lambda x: x.unflatten(-1, (2, -1)).mT)
    turned = (torch.view_as_real(torch.view_as_complex(pairs(x.float()).contiguous()) * turn) for x in (q, k))
    q_out, k_out = (pair.flatten(-2) if interleaved else pair.mT.flatten(-2) for pair in turned)
    return q_out.to(q.dtype), k_out.to(q.dtype)
