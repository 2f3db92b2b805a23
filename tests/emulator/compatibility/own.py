"""Kernels of this project in which faults are planted.  They have no row on the page of other projects' kernels."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compatibility.entries import Entry, Project
from compatibility.sources import Source
from rooflab.kernels._pdl import pdl
from rooflab.kernels.flash_attention.ping_pong import PingPongConfig, ping_pong
from rooflab.kernels.fused_add_rmsnorm.fused import fused as norm
from rooflab.kernels.gemm.cooperative import Ring, cooperative
from rooflab.kernels.gemm.multicast import ClusterTile, multicast
from rooflab.kernels.gemm.shared_tiles import shared_tiles
from rooflab.kernels.gemm.warp_specialized import Config, warp_specialized
from rooflab.kernels.merge_attention_states.fused import fused as merge
from rooflab.kernels.silu_and_mul.fused import fused as gate
from rooflab.reference.fused_add_rmsnorm import fused_add_rmsnorm as normed
from rooflab.reference.silu_and_mul import silu_and_mul as gated


def _parts(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Attention to two parts of the keys, each on a stream of its own, and the merge of both."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    outs, lses = q.new_empty(2, *q.shape[1:]), torch.empty(2, *q.shape[1:3])
    side.wait_stream(main)
    for out, lse, *keys, stream in zip(outs, lses, k.split(128, 1), v.split(128, 1), (main, side), strict=True):
        with torch.cuda.stream(stream):
            ping_pong(q, *keys, out=(out[None], lse[None]), return_lse=True)
    main.wait_stream(side)
    return merge(outs, lses)[0]


def _attention(*given: Tensor) -> Tensor:
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in given)).transpose(1, 2)


AB, QKV = "a=136x520:bf16,b=72x520:bf16", "q=1x136x1x64:bf16,k=1x{0}x1x64:bf16,v=1x{0}x1x64:bf16"
RING, TILES, PAIR = Ring(128, 64, 64, 3, 2, 32), Config(128, 64, 64, 4, 3, 8), ClusterTile(2, 128, 2, 8, 1)
TURNS = PingPongConfig(64, 2, 2)
OWN = {"rooflab": Project(
    Source("Rooflab", f"rooflab=={version('rooflab')}"),
    (
        Entry("gemm cooperative", AB, lambda a, b: cooperative(a, b.T, config=RING), lambda a, b: a @ b.T),
        Entry("gemm multicast", AB, lambda a, b: multicast(a, b.T, config=PAIR), lambda a, b: a @ b.T),
        Entry("gemm warp_specialized", AB, lambda a, b: warp_specialized(a, b.T, config=TILES), lambda a, b: a @ b.T),
        Entry("gemm shared_tiles", AB, lambda a, b: shared_tiles(a, b.T), lambda a, b: a @ b.T),
        Entry("attention ping_pong", QKV.format(280), lambda *x: ping_pong(*x, config=TURNS), _attention, allowed=2),
        Entry("attention on two streams", QKV.format(256), _parts, lambda *x: _attention(*x)[0], allowed=2),
        Entry("fused_add_rmsnorm of two layers", "x=3x96,r=3x96,w=96", pdl()(lambda x, r, w: norm(*norm(x, r, w), w)),
              lambda x, r, w: normed(*normed(x, r, w, 1e-6), w, 1e-6)),
        Entry("silu_and_mul of two layers", "x=3x256", pdl()(lambda x: gate(gate(x))), lambda x: gated(gated(x)[0])),
    ),
)}  # fmt: skip
