"""Kernels written in Helion: it compiles the kernels of this file to Triton, each with one fixed config."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from compatibility import sources
from compatibility.entries import Entry, Project
from compatibility.inductor import no_card
from compatibility.sources import Source

SOURCE = Source("Helion", "helion==1.5.1", "helion/", whole=True)
Tensor = torch.Tensor
hl: Any = None
"""Helion's language, which its compiler looks up here."""


def _add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size()):
        out[tile] = x[tile] + y[tile] * 2
    return out


def _softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        out[tile, :] = torch.softmax(x[tile, :], dim=1)
    return out


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        row = x[tile, :].to(torch.float32)
        scale = torch.rsqrt(torch.mean(row * row, dim=-1) + 1e-6)
        out[tile, :] = (row * scale[:, None] * w[:]).to(x.dtype)
    return out


def _sum(x: Tensor) -> Tensor:
    out = torch.empty([x.size(0)], dtype=x.dtype, device=x.device)
    for tile in hl.tile(x.size(0)):
        out[tile] = x[tile, :].sum(-1)
    return out


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    m, k = a.size()
    n = b.size(1)
    out = torch.empty([m, n], dtype=torch.float32, device=a.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, a[tile_m, tile_k], b[tile_k, tile_n])
        out[tile_m, tile_n] = acc
    return out


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    keys = k.size(1)
    head_dim = hl.specialize(q.size(2))
    for tile_b, tile_m in hl.tile([q.size(0), q.size(1)]):
        top = hl.full([tile_b, tile_m], float("-inf"), dtype=torch.float32)
        total = hl.full([tile_b, tile_m], 1.0, dtype=torch.float32)
        acc = hl.zeros([tile_b, tile_m, head_dim], dtype=torch.float32)
        query = q[tile_b, tile_m, :]
        for tile_n in hl.tile(keys):
            scores = torch.bmm(query, k[tile_b, tile_n, :].transpose(1, 2)).to(torch.float32)
            new = torch.maximum(top, torch.amax(scores, -1))
            p = torch.exp(scores - new[:, :, None])
            alpha = torch.exp(top - new)
            total = total * alpha + torch.sum(p, -1)
            acc = torch.baddbmm(acc * alpha[:, :, None], p.to(v.dtype), v[tile_b, tile_n, :])
            top = new
        out[tile_b, tile_m, :] = (acc / total[:, :, None]).to(out.dtype)
    return out


def _entry(
    name: str, inputs: str, function: Callable[..., Any], blocks: list[int], reference: Any, allowed: float = 1.0
) -> Entry:
    def call(*given: Tensor) -> Any:
        global hl
        helion, hl = SOURCE.module("helion"), SOURCE.module("helion.language")
        options = {"static_shapes": True, "ignore_warnings": [helion.exc.WrongDevice]}
        with no_card():
            began = time.perf_counter()
            kernel = helion.kernel(function, config=helion.Config(block_sizes=blocks), **options)
            bound = kernel.bind(given)
            bound.set_config(helion.Config(block_sizes=blocks))
            sources.importing_s += time.perf_counter() - began  # to write the code is Helion's time
            return bound(*given)

    return Entry(name, inputs, call, reference, allowed=allowed)


ENTRIES = (
    _entry("add", "x=37x70,y=37x70", _add, [16, 32], lambda x, y: x + 2 * y),
    _entry("softmax", "x=7x96", _softmax, [4], lambda x: torch.softmax(x, -1)),
    _entry("rms_norm", "x=7x96:bf16,w=96:bf16", _rms_norm, [2], lambda x, w: F.rms_norm(x, (96,), w, 1e-6)),
    _entry("sum", "x=37x70", _sum, [8], lambda x: x.sum(-1)),
    _entry("matmul", "a=37x70:bf16,b=70x50:bf16", _matmul, [16, 32, 32], lambda a, b: a @ b),
    _entry(
        "attention",
        "q=2x37x32:bf16,k=2x70x32:bf16,v=2x70x32:bf16",
        _attention,
        [1, 16, 32],
        lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v,
        16,
    ),
)
PROJECT = Project(SOURCE, ENTRIES)
