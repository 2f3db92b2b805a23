"""Over online, in Gluon: FlashAttention-3 (Shah et al., arXiv 2407.08608), which hides the exponentials.

One warp loads queries, keys and values by TMA and runs ahead through rings in shared memory, also into the next tile of
queries.  Two warpgroups have 64 rows of queries and an accumulator each.  They take turns: one computes exponentials
while the tensor cores work for the other.  Each also starts the next block's scores before it waits for this block's
values, so its own products overlap its exponentials too.  Gluon has no named barriers: the turn is one mbarrier each,
and costs a barrier of four warps; a step has five.

Tried, predicted, not built: docs/notes/flash_attention.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._attention import LOG2E, SMALLEST_SCALE, AttentionLaunch, get_scale, strides_of
from rooflab.kernels._device import sm_count
from rooflab.kernels._layouts import HEADS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import ALIGNMENT, MapMaker, map_maker
from rooflab.kernels.flash_attention._launch import section_heads
from rooflab.kernels.flash_attention._maps import nothing_seen, why_not_mapped
from rooflab.kernels.flash_attention._ping_pong_configs import (
    PING_PONG,
    ROWS,
    PingPongConfig,
    stages_in_queries,
    width_of,
)
from rooflab.kernels.flash_attention._ping_pong_device import _attention
from rooflab.kernels.flash_attention._timeline import TIMELINE
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def why_not_taken(inputs: Arguments) -> str | None:
    """Why TMA cannot load these tensors or wgmma cannot multiply them, or None."""
    q, softmax_scale = inputs.q, inputs.softmax_scale
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q: expected torch.float16 or torch.bfloat16, got {q.dtype}; online takes fp32, fp8 takes e4m3"
    if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= 256:
        return f"q: expected a head_dim of whole 16 bytes up to 256, got {q.shape[-1]}"
    if softmax_scale is not None and softmax_scale < 0:
        return f"softmax_scale: expected 0 or more, got {softmax_scale}; flash_attention/online takes it"
    return next((why for name in "qkv" if (why := why_not_mapped(name, getattr(inputs, name)))), None)


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a section's keys and values for its tiles of queries."""
    q, S, window = inputs.q, inputs.k.shape[1], inputs.window
    keys_read = S if window is None else min(S, q.shape[1] - 1 + window)
    lse = 4 * q.numel() // max(1, q.shape[-1]) if inputs.return_lse else 0
    return Traffic(nbytes(q) + nbytes(inputs.k, inputs.v) * keys_read / max(1, S), nbytes(q) + lse)


def _map(x: Tensor, rows: int) -> MapMaker:
    """The tensor map of x (B, T, H, D) as (B, H, T, D), in boxes of `rows` rows of a head; ends with each sequence."""
    B, T, H, D = x.shape
    tile = [1, 1, rows, width_of(D)]
    strides = [x.stride(dim) if x.shape[dim] > 1 else ALIGNMENT for dim in (0, 2, 1)]
    return map_maker(TensorDescriptor, [B, H, T, D], [*strides, 1], tile, HEADS)


def launch(of: Arguments) -> AttentionLaunch:
    """Raises `ValueError` on an output that TMA cannot store."""
    if reason := why_not_mapped("out", of.out):
        raise ValueError(reason)
    (B, T, H, D), S, config, softcap = of.q.shape, of.k.shape[1], of.config, of.softcap
    heads, group = B * H, H // of.k.shape[2]
    scale = max(get_scale(of.q, of.softmax_scale), SMALLEST_SCALE)
    capped = (1.0, 2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, None, None)
    return AttentionLaunch(
        min(cdiv(T, config.block_m) * heads, sm_count(of.q.device)),
        (T, S, H, group, heads, min(heads, section_heads(of.k, group))),
        (of.window if of.window is not None and of.window < S else None, *capped),
        (*strides_of(of.lse, 3), *strides_of(of.sinks, 1)),
        {
            "D": width_of(D), "CAUSAL": of.causal, "OUT_IN_Q": stages_in_queries(D), "num_warps": 4,
            **config.launch_arguments,
        },
        (_map(of.q, ROWS), _map(of.k, config.block_n), _map(of.v, config.block_n), _map(of.out, ROWS)),
    )  # fmt: skip


@kernel(
    backend="gluon", min_sm=90, unsupported=why_not_taken, aligned=("q", "k", "v"), traffic=traffic, tuning=PING_PONG,
    bind=launch, empty=nothing_seen,
)  # fmt: skip
def ping_pong(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    return_lse: bool, config: PingPongConfig, bound: AttentionLaunch,
) -> None:  # fmt: skip
    """A producer warp loads; warpgroups of 64 rows take turns at exponentials and products."""
    q_map, k_map, v_map, out_map = bound.maps
    _attention[(bound.ctas,)](
        q_map(q), k_map(k), v_map(v), out_map(out), lse, *bound.strides[:3], sinks, bound.strides[3], *bound.sizes,
        *bound.scores, TIMELINE.get(), **bound.flags,
    )  # fmt: skip
