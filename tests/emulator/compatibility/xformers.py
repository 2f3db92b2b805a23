"""Kernels of xFormers."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from compatibility.entries import Entry, Project
from compatibility.sources import Source

SOURCE = Source("xFormers", "xformers==0.0.35", "xformers/")
Tensor = torch.Tensor
_triton = SOURCE.below("xformers.ops._triton")


def _index(size: int) -> Tensor:
    return torch.arange(size).flip(0) * 2


def _selected(x: Tensor, out: Tensor) -> Tensor:
    _triton("k_index_select_cat").index_select_cat_fwd(out, x, _index(5))
    return out


def _scattered(x: Tensor, grad: Tensor) -> Tensor:
    _triton("k_index_select_cat").index_select_cat_bwd(x.zero_(), _index(5), grad)
    return x


def _added(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    _triton("k_scaled_index_add").scaled_index_add_fwd(x, _index(5), s, w, 0.5)
    return x


ENTRIES = (
    Entry(
        "rms_norm",
        "x=7x96,w=96",
        lambda x, w: _triton("rmsnorm_kernels")._rms_norm_forward(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (96,), w, 1e-6),
    ),
    Entry(
        "rms_norm_add",
        "x=7x96,y=7x96,w=96",
        lambda x, y, w: (_triton("rmsnorm_kernels")._rms_norm_add_forward(x, y, w, 1e-6), x)[0],
        lambda x, y, w: F.rms_norm(x + y, (96,), w, 1e-6),
    ),
    Entry("index_select_cat", "x=11x96,out=5x96", _selected, lambda x, out: x[_index(5)]),
    Entry(
        "index_select_cat backward",
        "x=11x96,grad=5x96",
        _scattered,
        lambda x, grad: torch.zeros_like(x).index_add(0, _index(5), grad),
    ),
    Entry(
        "scaled_index_add", "x=11x3x40,s=5x3x40,w=40", _added, lambda x, s, w: x.index_add(0, _index(5), 0.5 * s * w)
    ),
)
PROJECT = Project(SOURCE, ENTRIES)
