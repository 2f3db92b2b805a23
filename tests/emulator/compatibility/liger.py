"""Kernels of Liger-Kernel, most of them forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from compatibility.entries import Entry, Project
from compatibility.sources import Source

SOURCE = Source("Liger-Kernel", "liger-kernel==0.8.5", "liger_kernel/")


def _of(file: str, name: str) -> Any:
    """One of its autograd functions."""
    return getattr(SOURCE.module(f"liger_kernel.ops.{file}"), f"Liger{name}Function").apply


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def _angles(cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of both halves of a head."""
    both = torch.cat([cos, cos], -1)
    return both.cos(), both.sin()


def _kl(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")


def _jsd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    q, p = x.log_softmax(-1), y.log_softmax(-1)
    m = (q.exp() + p.exp()) / 2
    return ((p.exp() * (p - m.log()) + q.exp() * (q - m.log())) / 2).sum() / x.shape[0]


def _poly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    norms = [u * (u.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for u in (x**3, x**2, x)]
    return w[0] * norms[0] + w[1] * norms[1] + w[2] * norms[2] + b


def _sparsemax(x: torch.Tensor) -> torch.Tensor:
    z = x.sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1)
    support = (1 + k * z > z.cumsum(-1)).sum(-1, keepdim=True)
    return (x - (z.cumsum(-1).gather(-1, support - 1) - 1) / support).clamp(min=0)


def _attn_res(v: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    keys = F.rms_norm(v, (v.shape[-1],), w, 1e-6)
    return ((keys @ q).softmax(0)[..., None] * v).sum(0)


def _linear_jsd(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return _jsd(x @ w.T, t @ u.T)


ENTRIES = (
    Entry(
        "rms_norm", "x=7x96,w=96", lambda x, w: _of("rms_norm", "RMSNorm")(x, w, 1e-6, 0.0, "llama", False),
        lambda x, w: F.rms_norm(x, (96,), w, 1e-6), "x,w",
    ),
    Entry(
        "rms_norm by blocks", "x=4099x96,w=96",
        lambda x, w: _of("rms_norm", "RMSNorm")(x, w, 1e-6, 1.0, "gemma", False),
        lambda x, w: F.rms_norm(x, (96,), w + 1, 1e-6),
    ),
    Entry(
        "fused_add_rms_norm", "x=7x96,r=7x96,w=96",
        lambda x, r, w: _of("fused_add_rms_norm", "FusedAddRMSNorm")(x, r, w, 1e-6, 0.0, "llama", False),
        lambda x, r, w: (F.rms_norm(x + r, (96,), w, 1e-6), x + r), "x,r,w",
    ),
    Entry(
        "modulated_rms_norm", "x=2x7x96,w=96,scale=2x96,shift=2x96",
        lambda x, w, scale, shift: _of("modulated_rms_norm", "ModulatedRMSNorm")(
            x, w, scale, shift, 1e-6, 0.0, "llama", False
        ),
        lambda x, w, scale, shift: F.rms_norm(x, (96,), w, 1e-6) * (1 + scale[:, None]) + shift[:, None], "x,w",
    ),
    Entry(
        "layer_norm", "x=7x96,w=96,b=96", lambda x, w, b: _of("layer_norm", "LayerNorm")(x, w, b, 1e-6),
        lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-6), "x,w,b",
    ),
    Entry(
        "group_norm", "x=3x6x50,w=6,b=6", lambda x, w, b: _of("group_norm", "GroupNorm")(x, w, b, 6, 2, 1e-6),
        lambda x, w, b: F.group_norm(x, 2, w, b, 1e-6), "x,w,b",
    ),
    Entry(
        "poly_norm", "x=7x96,w=3,b=1", lambda x, w, b: _of("poly_norm", "PolyNorm")(x, w, b, 1e-6, False), _poly,
        "x,w",
    ),
    Entry(
        "dyt", "x=7x96,a=1,g=96,b=96", lambda x, a, g, b: _of("dyt", "DyT")(x, a, g, b),
        lambda x, a, g, b: g * torch.tanh(a * x) + b, "x,a,g,b",
    ),
    Entry("swiglu", "a=7x96,b=7x96", lambda a, b: _of("swiglu", "SiLUMul")(a, b), lambda a, b: F.silu(a) * b, "a,b"),
    Entry(
        "geglu", "a=7x96,b=7x96", lambda a, b: _of("geglu", "GELUMul")(a, b),
        lambda a, b: F.gelu(a, approximate="tanh") * b, "a,b",
    ),
    Entry("relu_squared", "x=7x96", lambda x: _of("relu_squared", "ReLUSquared")(x), lambda x: x.relu() ** 2, "x"),
    Entry("softmax", "x=7x96", lambda x: _of("softmax", "Softmax")(x), lambda x: x.softmax(-1), "x"),
    Entry("sparsemax", "x=7x96", lambda x: _of("sparsemax", "Sparsemax")(x, -1), _sparsemax, "x"),
    Entry(
        "cross_entropy", "x=7x99,y=7:i64<99",
        lambda x, y: _of("cross_entropy", "CrossEntropy")(x, y, None, -100, 0.0, 0.1, "mean", None)[0],
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), "x",
    ),
    Entry(
        "fused_linear_cross_entropy", "x=7x48,w=99x48,y=7:i64<99",
        lambda x, w, y: _of("fused_linear_cross_entropy", "FusedLinearCrossEntropy")(x, w, y)[0],
        lambda x, w, y: F.cross_entropy(x @ w.T, y), "x,w",
    ),
    Entry(
        "kl_div", "x=7x96,y=7x96",
        lambda x, y: _of("kl_div", "KLDivLoss")(x.log_softmax(-1), y.softmax(-1), "batchmean", False), _kl, "x",
    ),
    Entry("jsd", "x=7x96,y=7x96", lambda x, y: _of("jsd", "JSD")(x.log_softmax(-1), y.log_softmax(-1)), _jsd, "x"),
    Entry(
        "fused_linear_jsd", "x=7x48,w=99x48,t=7x48,u=99x48",
        lambda x, w, t, u: _of("fused_linear_jsd", "FusedLinearJSD")(x, w, t, u, None, 0.5), _linear_jsd, "x,w", 4.0,
    ),
    Entry(
        "tvd", "x=7x96,y=7x96", lambda x, y: _of("tvd", "TVDLoss")(x.softmax(-1), y.softmax(-1)),
        lambda x, y: (x.softmax(-1) - y.softmax(-1)).abs().sum() / 2 / 7, "x",
    ),
    Entry(
        "rope", "q=2x3x7x32,k=2x1x7x32,t=1x7x16",
        lambda q, k, t: _of("rope", "Rope")(q, k, *_angles(t)),
        lambda q, k, t: tuple(_rope(x, *(each[:, None] for each in _angles(t))) for x in (q, k)), "q,k",
    ),
    Entry(
        "qwen2vl_mrope", "q=2x3x7x32,k=2x1x7x32,t=3x2x7x16",
        lambda q, k, t: _of("qwen2vl_mrope", "Qwen2VLMRope")(q, k, *_angles(t), [4, 6, 6]),
        lambda q, k, t: tuple(
            _rope(x, *(each[:, None] for each in _angles(torch.cat([
                part[n] for n, part in enumerate(t.split([4, 6, 6], -1))], -1)))) for x in (q, k)), "q,k",
    ),
    Entry(
        "attn_res", "v=5x7x96,q=96,w=96", lambda v, q, w: _of("attn_res", "AttnRes")(v, q, w, 1e-6), _attn_res,
        "v,q,w",
    ),
    Entry(
        "multi_token_attention", "s=1x2x20x20,w=2x2x3x3,b=2",
        lambda s, w, b: _of("multi_token_attention", "MultiTokenAttention")(s, w, b, 1, 1, 1, 1, False),
        lambda s, w, b: torch.tril(F.conv2d(
            s.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1), w, b, padding=1)), "s,w,b",
    ),
)  # fmt: skip
PROJECT = Project(SOURCE, ENTRIES)
