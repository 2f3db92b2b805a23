"""Right kernels in the ways in which people write and wrap them, which a too strict checker would refuse.

Each is right for every layout and every value of what it takes; `unsupported` names what it does not take.  By hand,
`ROOFLAB_ATTACK=lookup_table rooflab check silu_and_mul --kernel tests/attacks/rightful.py` registers and checks one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import threading
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooflab.kernels.registry import register

COMPILER = shutil.which("c++") or shutil.which("g++")


def rightful(op: str, name: str = "", **options: Any) -> Callable[..., Any]:
    """Registers the decorated function, unless `ROOFLAB_ATTACK` names another one."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if (own := name or fn.__name__) == os.environ.get("ROOFLAB_ATTACK", own):
            register(op=op, name=own, role="optimized", **{"backend": "torch", "devices": ("cpu",), **options})(fn)
        return fn

    return decorate


def compiled(op: str, name: str, fn: Callable[..., Any], **options: Any) -> None:
    """Registers what `torch.compile` makes of a function; its usual backend needs a C++ compiler."""
    if COMPILER or "backend" in options:
        rightful(op, name)(torch.compile(fn, **options))


_softmax = lambda x: x.float().softmax(-1).to(x.dtype)
_add_and_norm = lambda x, residual, weight, eps=1e-6: (_norm(x + residual, weight, eps), x + residual)


def _norm(x, weight, eps=1e-6):
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def _layernorm(wide, x, weight, bias=None, eps=1e-5):
    centred = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(wide)
    return (scaled if bias is None else scaled + bias.to(wide)).to(x.dtype)


def _gelu(x):
    gate, up = x.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def _gemm_silu(a, b):
    gate, up = (a.float() @ b.float()).chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(a.dtype)


_layernorm32 = lambda x, weight, bias=None, eps=1e-5: _layernorm(torch.float32, x, weight, bias, eps)
# Traced and guarded at the first call, and compiled in each mode or by another backend.
compiled("gemm_silu_and_mul", "compiled_default", _gemm_silu)
compiled("rmsnorm", "compiled_reduce_overhead", _norm, mode="reduce-overhead")
compiled("gelu_and_mul", "compiled_max_autotune", _gelu, mode="max-autotune-no-cudagraphs")
compiled("softmax", "compiled_dynamic", _softmax, dynamic=True)
compiled("fused_add_rmsnorm", "compiled_by_eager", _add_and_norm, backend="eager")
compiled("layernorm", "compiled_by_aot_eager", _layernorm32, backend="aot_eager")
# The first argument is bound; results that know no gradient; a function of one row.
rightful("layernorm", "partial_in_float64")(functools.partial(_layernorm, torch.float64))
rightful("gelu_and_mul", "under_no_grad")(torch.no_grad()(_gelu))
rightful("gemm_silu_and_mul", "under_inference_mode")(torch.inference_mode()(_gemm_silu))
rightful("softmax", "vmap_over_rows")(lambda x: torch.vmap(_softmax)(x) if len(x) else torch.empty_like(x))
_graph = torch.compile(lambda gate, up: gate * gate.sigmoid() * up, fullgraph=True, dynamic=True)


@rightful("silu_and_mul") if COMPILER else lambda fn: fn
@torch.inference_mode()
def compiled_fullgraph(x):
    """One graph without a break, over flat fp32 copies, so that few shapes are compiled."""
    flat = lambda half: half.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(-1)
    return _graph(*map(flat, x.chunk(2, -1))).view(len(x), -1).to(x.dtype) if len(x) else x[:, ::2].clone()


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Heads x (T, heads, R) turned by cos and sin (T, R/2)."""
    c, s, half = cos[:, None], sin[:, None], x.shape[2] // 2
    first, second = x[:, :, :half].float(), x[:, :, half:].float()
    if interleaved:
        first, second = x[:, :, 0::2].float(), x[:, :, 1::2].float()
    turned = first * c - second * s, second * c + first * s
    return (torch.stack(turned, -1).flatten(2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


_scripted = functools.cache(torch.jit.script)


@rightful("rope")
def torch_script(q, k, cos, sin, positions, interleaved=False):
    """TorchScript of a function with a branch, compiled at the first call."""
    return tuple(_scripted(_turn)(x, cos[positions], sin[positions], interleaved) for x in (q, k))


@rightful("rope")
def vmap_over_heads(q, k, cos, sin, positions, interleaved=False):
    """`vmap` of the turn of one head."""
    one = lambda head: _turn(head[:, None], cos[positions], sin[positions], interleaved)[:, 0]
    return tuple(torch.vmap(one, in_dims=1, out_dims=1)(x) for x in (q, k))


@functools.cache
def _triton_softmax():
    global tl
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr, out_ptr, H, BLOCK: tl.constexpr):
        columns, start = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * H
        x = tl.load(x_ptr + start + columns, mask=columns < H, other=float("-inf")).to(tl.float32)
        parts = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + start + columns, parts / tl.sum(parts, 0), columns < H)

    return kernel


_one_launch = threading.Lock()
_too_wide = lambda inputs: "x: takes rows of at most 16384" if inputs.x.shape[1] > 16384 else None


@rightful("softmax", backend="triton", devices=("cpu", "cuda"), unsupported=_too_wide)
def triton_rows(x):
    """Triton, imported by the launcher; a lock, because the interpreter runs one launch at a time."""
    x, out = x.contiguous(), torch.empty(x.shape, device=x.device)
    with _one_launch:
        if len(x):
            _triton_softmax()[(len(x),)](x, out, x.shape[1], BLOCK=1 << (x.shape[1] - 1).bit_length())
    return out.to(x.dtype)


class _Module(torch.nn.Module):
    def forward(self, x, weight, eps=1e-6):
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        return _norm(x, weight, eps)


# `out=` of new memory; the bound method of a module; a function of autograd, which saves its inputs.
_selected = lambda ids, weight: torch.index_select(weight, 0, ids, out=weight.new_empty(len(ids), weight.shape[1]))
rightful("embedding", "out_of_index_select")(lambda token_ids, weight: _selected(token_ids, weight))
rightful("rmsnorm", "module_forward")(_Module().eval().forward)
rightful("rmsnorm", "autograd_function")(lambda x, weight, eps=1e-6: _Function.apply(x, weight, eps))


@functools.cache
def _silu_of_all(dtype):
    return F.silu(torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float())


@rightful("silu_and_mul", unsupported=lambda inputs: None if inputs.x.itemsize == 2 else "x: takes 16 bits")
def lookup_table(x):
    """The bits of a gate are its place in a table of all 65536 values, which the first call builds."""
    gate, up = x.chunk(2, -1)
    return (_silu_of_all(x.dtype)[gate.view(torch.int16).long() + 2**15] * up.float()).to(x.dtype)


_kept = threading.local()


@rightful("silu_and_mul")
def scratch_of_a_thread(x):
    """`out=` into memory that each thread keeps between its calls; the result is a copy."""
    gate, up = x.float().chunk(2, -1)
    if not hasattr(_kept, "room") or _kept.room.numel() < gate.numel():
        with torch.inference_mode(False):
            _kept.room = torch.empty(gate.numel())
    room = _kept.room[: gate.numel()].view(gate.shape)
    torch.mul(torch.sigmoid(gate, out=room), gate, out=room)
    return torch.mul(room, up, out=room).to(x.dtype, copy=True)


@rightful("gelu_and_mul")
def threads_over_rows(x):
    """Three threads, each with a block of rows; there may be fewer rows."""
    with ThreadPoolExecutor(3) as pool:
        return torch.cat(list(pool.map(_gelu, x.tensor_split(3))))


@rightful("fused_add_rmsnorm")
def in_place_on_copies(x, residual, weight, eps=1e-6):
    """Contiguous copies of the inputs first, then steps in place."""
    total = x.clone(memory_format=torch.contiguous_format).add_(residual)
    wide = total.to(torch.float64, copy=True)
    return wide.div_(wide.square().mean(-1, keepdim=True).add_(eps).sqrt_()).mul_(weight).to(x.dtype), total


@rightful("embedding")
def memmove_of_rows(token_ids, weight):
    """ctypes moves each row from its address to its place."""
    out = torch.empty(len(token_ids), weight.shape[1], dtype=weight.dtype)
    for place, token in zip(out, token_ids.tolist(), strict=True):
        row = weight[token].contiguous()
        ctypes.memmove(place.data_ptr(), row.data_ptr(), row.nbytes)
    return out


@rightful("embedding")
def numpy_of_bits(token_ids, weight):
    """NumPy takes the rows as integers, because it has no bf16."""
    bits = weight.view(torch.int16 if weight.itemsize == 2 else torch.int32).numpy()
    return torch.from_numpy(bits.take(token_ids.numpy(), 0)).view(weight.dtype)


@rightful("kv_cache_write")
def index_put(k, v, k_cache, v_cache, slot_mapping):
    """`index_put_` of page and offset, into caches of any layout."""
    size, kept = k_cache.shape[1], slot_mapping >= 0
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.index_put_((slot_mapping[kept] // size, slot_mapping[kept] % size), new[kept])


@torch.library.custom_op("rightful::cache_write", mutates_args=("k_cache", "v_cache"))
def _write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    index_put(k, v, k_cache, v_cache, slots)


_write.register_fake(lambda k, v, k_cache, v_cache, slots: None)


@rightful("kv_cache_write")
def custom_op(k, v, k_cache, v_cache, slot_mapping):
    """An op of torch's dispatcher, which declares what it changes."""
    torch.ops.rightful.cache_write(k, v, k_cache, v_cache, slot_mapping)


def _add(product, *addends):
    return functools.reduce(lambda total, each: total if each is None else total + each.float(), addends, product)


@rightful("gemm")
def einsum(a, b, bias=None, *, residual=None, precision="ieee"):
    """One einsum."""
    return _add(torch.einsum("mk,kn->mn", a.float(), b.float()), bias, residual).to(a.dtype)


@rightful("gemm")
def out_of_addmm(a, b, bias=None, out=None, *, residual=None, precision="ieee"):
    """Parts of K, added by `addmm` into one buffer; `out` may be the caller's."""
    total = _add(torch.zeros(len(a), b.shape[1]), bias, residual)
    for left, right in zip(a.split(40, 1), b.split(40), strict=True):
        torch.addmm(total, left.float(), right.float(), out=total)
    return total.to(a.dtype) if out is None else out.copy_(total)


class _Tuned:
    """Times two ways at the first call of each shape, and keeps the quicker."""

    ways, kept = (lambda a, b: a @ b, lambda a, b: (b.mT @ a.mT).mT), {}

    def __call__(self, a, b, bias=None, *, residual=None, precision="ieee"):
        operands, key = (a.float(), b.float()), (a.shape, b.shape, a.stride(), b.stride(), a.dtype)
        if key not in self.kept:
            seconds = [timeit.timeit(functools.partial(way, *operands), number=2) for way in self.ways]
            self.kept.setdefault(key, self.ways[seconds.index(min(seconds))])
        return _add(self.kept[key](*operands), bias, residual).to(a.dtype)


# An object that is called.
rightful("gemm", "tuned_object")(_Tuned())


@rightful("gemm_grouped")
def split_at_offsets(a, b, offsets):
    """A product for each expert, also for those without rows."""
    groups = zip(a.tensor_split(offsets[1:-1].long()), b, strict=True)
    return torch.cat([rows.float() @ weight.float() for rows, weight in groups]).to(a.dtype)


@rightful("merge_attention_states")
def running_merge(outs, lses):
    """Part after part, as they arrive, in fp64."""
    total, merged = torch.full(lses.shape[1:], -math.inf).double(), 0.0
    for out, lse in zip(outs.double(), lses.double(), strict=True):
        both = torch.logaddexp(total, lse)
        old, own = ((each - both.masked_fill(both == -math.inf, 0)).exp()[..., None] for each in (total, lse))
        total, merged = both, merged * old + out.where(own != 0, 0) * own
    return merged.to(outs.dtype), total.float()


def _attend(q, k, v, causal, scale):
    """Attention of q (T, H, D) over k and v (S, H_kv, D), in fp32."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) if causal else len(k))
    scores = scores.masked_fill(~seen, -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    weights = (scores - total.masked_fill(total == -math.inf, 0)).exp()
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


_not_fp8 = lambda inputs: "q: takes no fp8" if inputs.q.itemsize == 1 else None


@rightful("flash_attention", unsupported=_not_fp8)
def vmap_over_sequences(q, k, v, causal=False, softmax_scale=None):
    """`vmap` of the attention of one sequence."""
    return torch.vmap(lambda *operands: _attend(*operands, causal, softmax_scale))(q, k, v)


@rightful("flash_attention", unsupported=_not_fp8)
def sdpa(q, k, v, causal=False, softmax_scale=None):
    """torch's attention with a mask of its own; the result is a transposed view."""
    T, S = q.shape[1], k.shape[1]
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T if causal else S)
    heads = (x.transpose(1, 2).float() for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return out.where(seen.any(1)[:, None], 0).transpose(1, 2).to(q.dtype)


@rightful("paged_attention")
def gathered_pages(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, cu_seqlens_q=None):
    """The tokens of each sequence, gathered from its pages."""
    bounds, outs = range(len(q) + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist(), []
    for b, length in enumerate(seq_lens.tolist()):
        token = torch.arange(length)
        slots = block_table[b].long()[token // k_cache.shape[1]], token % k_cache.shape[1]
        outs.append(_attend(q[bounds[b] : bounds[b + 1]], k_cache[slots], v_cache[slots], True, softmax_scale))
    return torch.cat(outs)
