"""Right kernels, written and wrapped in the ways that people use, which a checker that is too strict would refuse.

Each kernel is right for every layout and every value that it takes; `unsupported` names the input that it refuses.
"""

from __future__ import annotations

import functools
import math
import random

import torch
import torch.nn.functional as F

from .entries import Kind, with_first
from .parts import added, gated, gelu_and_mul, normed, shares, turned, visible

compiled = Kind(__name__, "right: compiled", "OK", devices=("cpu",))
in_cpp = Kind(__name__, "right: compiled to C++", "OK", devices=("cpu",))
wrapped = Kind(__name__, "right: wrapped", "OK", devices=("cpu",))
formula = Kind(__name__, "right: another formula", "OK", devices=("cpu",))
outside = Kind(__name__, "right: wrong only outside of the contract", "OK", devices=("cpu",))
order = Kind(__name__, "right: another order of sums", "OK", devices=("cpu",))


def rmsnorm(x, weight, eps=1e-6):
    return normed(x, weight, eps).to(x.dtype)


def add_and_norm(x, residual, weight, eps=1e-6):
    return rmsnorm(x + residual, weight, eps), x + residual


def layernorm(x, weight, bias=None, eps=1e-5):
    centred = x.float() - x.float().mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()
    return added(scaled, bias).to(x.dtype)


def gemm_silu_and_mul(a, b):
    return gated(a.float() @ b.float()).to(a.dtype)


def softmax(x):
    return x.float().softmax(-1).to(x.dtype)


# Traced and guarded at the first call, and compiled in each mode or by another backend.  The usual backend makes C++.
for kind, op, name, fn, how in (
    (in_cpp, "gemm_silu_and_mul", "compiled_default", gemm_silu_and_mul, {}),
    (in_cpp, "softmax", "compiled_dynamic", softmax, {"dynamic": True}),
    (compiled, "fused_add_rmsnorm", "compiled_by_eager", add_and_norm, {"backend": "eager"}),
    (compiled, "layernorm", "compiled_by_aot_eager", layernorm, {"backend": "aot_eager"}),
):
    kind.enter(op, name, (), functools.partial(torch.compile, fn, **how))


@compiled.made("rope", name="torch_script")
def scripted():
    """TorchScript of a function with a branch, compiled at the first call."""
    script = functools.cache(torch.jit.script)

    def torch_script(q, k, cos, sin, positions, interleaved=False):
        return tuple(script(turned)(x, cos[positions], sin[positions], interleaved) for x in (q, k))

    return torch_script


class Module(torch.nn.Module):
    def forward(self, x, weight, eps=1e-6):
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        return rmsnorm(x, weight, eps)


# The bound method of a module; a function of autograd, which saves its inputs; results that autograd must not touch;
# results that know no gradient.
wrapped("rmsnorm", name="module_forward")(Module().eval().forward)
wrapped("rmsnorm", name="autograd_function")(lambda x, weight, eps=1e-6: Function.apply(x, weight, eps))
wrapped("rmsnorm", name="inference_mode")(torch.inference_mode()(rmsnorm))
wrapped("gelu_and_mul", name="under_no_grad")(torch.no_grad()(gelu_and_mul))


@wrapped("rmsnorm")
def row_by_row(x, weight, eps=1e-6):
    """`vmap` of a function of one row."""
    return torch.vmap(lambda row: rmsnorm(row, weight, eps))(x) if len(x) else torch.empty_like(x)


def attend(q, k, v, causal, scale):
    """Attention of q (T, H, D) over k and v (S, H_kv, D), in fp32, without a branch on values."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible(len(q), len(k), causal), -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    weights = (scores - total.masked_fill(total == -math.inf, 0)).exp()
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


def no_fp8(inputs):
    return "q: takes no fp8" if inputs.q.itemsize == 1 else None


@wrapped("flash_attention", unsupported=no_fp8)
def sdpa(q, k, v, causal=False, softmax_scale=None):
    """torch's attention with a mask of its own; the result is a transposed view."""
    seen = visible(q.shape[1], k.shape[1], causal)
    heads = (x.transpose(1, 2).float() for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return out.where(seen.any(1)[:, None], 0).transpose(1, 2).to(q.dtype)


@formula("rmsnorm")
def in_float64(x, weight, eps=1e-6):
    """More exact than it needs to be: the bits may be the oracle's own."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(x.dtype)


@formula("gemm_w8a16", prepare=lambda b: b.mT.contiguous().to(torch.bfloat16))
def packed_once(a, b, scale, bias=None):
    """`prepare` stores the weight as (N, K) in bf16, and the kernel takes only that."""
    return added(a.float() @ b.mT.float() * scale.float(), bias).to(a.dtype)


@formula("rope")
def by_complex_numbers(q, k, cos, sin, positions, interleaved=False):
    """A turn is a product of complex numbers, in buffers that are not contiguous."""
    turn = torch.complex(cos, sin)[positions][:, None]
    pairs = (lambda x: x.unflatten(-1, (-1, 2))) if interleaved else (lambda x: x.unflatten(-1, (2, -1)).mT)
    both = (
        torch.view_as_real(torch.view_as_complex(pairs(x.float()).clone(memory_format=torch.contiguous_format)) * turn)
        for x in (q, k)
    )
    q_out, k_out = (pair.flatten(-2) if interleaved else pair.mT.flatten(-2) for pair in both)
    return q_out.to(q.dtype), k_out.to(q.dtype)


@formula("paged_attention")
def gathered_pages(q, k_cache, v_cache, block_table, seq_lens, softmax_scale=None, *, cu_seqlens_q=None):
    """The tokens of each sequence, gathered from its pages."""
    bounds, outs = range(len(q) + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist(), []
    for b, length in enumerate(seq_lens.tolist()):
        token = torch.arange(length)
        slots = block_table[b].long()[token // k_cache.shape[1]], token % k_cache.shape[1]
        outs.append(attend(q[bounds[b] : bounds[b + 1]], k_cache[slots], v_cache[slots], True, softmax_scale))
    return torch.cat([q[:0], *outs])


@formula("gemm_grouped")
def split_at_offsets(a, b, offsets):
    """A product for each expert, also for those without rows."""
    groups = zip(a.tensor_split(offsets[1:-1].long()), b, strict=True)
    return torch.cat([rows.float() @ weight.float() for rows, weight in groups]).to(a.dtype)


@formula("merge_attention_states")
def by_einsum(outs, lses):
    """One contraction over the parts; a part that saw no key is replaced before."""
    weights, total = shares(lses)
    seen = outs.float().where(lses.isfinite()[..., None], 0)
    return torch.einsum("pth,pthd->thd", weights[..., 0], seen).to(outs.dtype), total


@order("merge_attention_states")
def running_merge(outs, lses):
    """Part after part, as they arrive, in fp64."""
    total, merged = torch.full(lses.shape[1:], -math.inf).double(), 0.0
    for out, lse in zip(outs.double(), lses.double().masked_fill(lses == math.inf, -math.inf), strict=True):
        both = torch.logaddexp(total, lse)
        old, own = ((each - both.masked_fill(both == -math.inf, 0)).exp()[..., None] for each in (total, lse))
        total, merged = both, merged * old + out.where(own != 0, 0) * own
    return merged.to(outs.dtype), total.float()


def products(a, b, size):
    """The products of parts of K."""
    return [left.float() @ right.float() for left, right in zip(a.split(size, 1), b.split(size), strict=True)]


def gemm_by(product):
    """A GEMM from a product of fp32 matrices."""
    return lambda a, b, bias=None, *, residual=None, precision="ieee": added(
        product(a.float(), b.float()), bias, residual
    ).to(a.dtype)


# One einsum; parts of K, added from the last to the first, or in another order at every call, as atomic additions come,
# which it says; a generator of tiles of a transposed product, which lies transposed in memory.
formula("gemm", name="einsum")(gemm_by(lambda a, b: torch.einsum("mk,kn->mn", a, b)))
order("gemm", name="split_k_backwards")(gemm_by(lambda a, b: sum(reversed(products(a, b, 64)))))
order("gemm", name="atomics", nondeterministic="the parts of K are added in the order of their arrival")(
    gemm_by(lambda a, b: sum(random.sample(parts := products(a, b, 16), len(parts))))
)
order("gemm", name="stream_of_tiles")(
    gemm_by(lambda a, b: torch.cat([*(torch.einsum("kn,mk->nm", b, rows) for rows in a.split(48))], 1).mT.contiguous())
)


@outside.changed("sample")
def nan_row_gives_minus_1(of):
    """A row with a NaN, for which the op states no token, gives the token -1."""
    return with_first(of.right(), lambda tokens: tokens.masked_fill(of.logits.isnan().any(1), -1))
