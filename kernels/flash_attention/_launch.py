"""What the launches of flash_attention's Triton kernels share: numbers and flags, and the bytes that they move."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from rooflab.kernels._attention import AttentionLaunch, softmax_numbers, strides_of
from rooflab.kernels._attention_configs import padded
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.flash_attention._maps import columns_map, tensor_map
from rooflab.reference.flash_attention import E4M3, keys_contiguous
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

SECTION_BYTES = 32 * 2**20
"""Keys and values that L2 is assumed to keep, of its 50 MB, for the order of tiles; unmeasured."""


def launch_of(*by_pointers: str) -> Callable[[Arguments], AttentionLaunch]:
    """What works out the launch of a kernel that loads these of q, k and v by pointers, and the others by TMA: the
    strides are those of what pointers load, of the output, the log-sum-exp and the sinks."""

    def work_out(of: Arguments) -> AttentionLaunch:
        (B, T, H, D), S, config = of.q.shape, of.k.shape[1], of.config
        windowed = of.window is not None and of.window < S  # a wider window hides nothing
        scale, factor, cap, negated = softmax_numbers(of.q, of.softmax_scale, of.softcap)
        strides = [getattr(of, name).stride()[:3] for name in (*by_pointers, "out")]
        v_map = columns_map if keys_contiguous(of.v) else tensor_map
        makers = {"q": (tensor_map, config.block_m), "k": (tensor_map, config.block_n), "v": (v_map, config.block_n)}
        return AttentionLaunch(
            cdiv(T, config.block_m) * B * H,
            (T, S, H, H // of.k.shape[2]),
            (of.window if windowed else 0, scale, factor, cap),
            (*itertools.chain(*strides), *strides_of(of.lse, 3), *strides_of(of.sinks, 1)),
            {
                "CAUSAL": of.causal, "WINDOW": windowed, "CAP": of.softcap is not None, "NEGATED": negated,
                "SINKS": of.sinks is not None, "LSE": of.return_lse, "HEAD_DIM": D, "BLOCK_D": padded(D),
                **config.launch_arguments,
            },
            tuple(make(getattr(of, x), rows) for x, (make, rows) in makers.items() if x not in by_pointers),
        )  # fmt: skip

    return work_out


def section_heads(k: torch.Tensor, group: int) -> int:
    """Query heads of a section: those of as many heads of keys and values (B, S, H_kv, D) as L2 keeps."""
    head_bytes = 2 * k.shape[1] * k.shape[3] * k.element_size()
    return max(1, SECTION_BYTES // head_bytes) * group


def why_no_tile(inputs: Arguments) -> str | None:
    """Why a tile by pointers cannot have these head_dims or dtypes, or None."""
    q = inputs.q
    if q.dtype == E4M3:
        return f"q: expected torch.float32, torch.float16 or torch.bfloat16, got {E4M3}; flash_attention/fp8 takes it"
    if not 16 <= q.shape[-1] <= 256:
        return f"q: expected a head_dim of 16 to 256, got {q.shape[-1]}; flash_attention/naive takes any"
    return None


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its tiles of queries; keys before every window are not
    read."""
    q, k, window = inputs.q, inputs.k, inputs.window
    T, S = q.shape[1], k.shape[1]
    keys_read = S if window is None else min(S, T - 1 + window)
    lse = 4 * q.numel() // max(1, q.shape[-1]) if inputs.return_lse else 0
    return Traffic(nbytes(q) + nbytes(k, inputs.v) * keys_read / max(1, S) + nbytes(inputs.sinks), nbytes(q) + lse)
