"""What the launchers of flash_attention's Triton kernels share: bytes moved, tensor maps, and results without keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._attention_configs import padded
from rooflab.kernels._tma import ALIGNMENT, MapMaker
from rooflab.kernels.lib.tma import map_maker
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

ROWS, COLUMNS = (0, 2, 1, 3), (0, 2, 3, 1)
"""The order of the dimensions of (B, T, H, D) in a map: rows of a head, or, of values along their keys, its columns."""


def tensor_map(x: torch.Tensor, rows: int, order: Sequence[int] = ROWS) -> MapMaker:
    """The map of x (B, T, H, D) in this order, in boxes of `rows` positions of a head; zeros past a sequence's end."""
    box = 1, rows, 1, padded(x.shape[3])
    strides = [x.stride(dim) if x.shape[dim] > 1 else ALIGNMENT for dim in order[:3]]
    return map_maker(TensorDescriptor, [x.shape[dim] for dim in order], [*strides, 1], [box[dim] for dim in order])


def nothing_seen(of: Arguments) -> None:
    """Writes the result without keys, for which no tensor map exists: 0, and the log-sum-exp of the sinks alone."""
    of.out.zero_()
    if of.lse is not None:
        of.lse.fill_(float("-inf")) if of.sinks is None else of.lse.copy_(of.sinks)


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its tiles of queries; keys before every window are not
    read.  The result of fp8 is bf16."""
    q, k, window = inputs.q, inputs.k, inputs.window
    T, S = q.shape[1], k.shape[1]
    keys_read = S if window is None else min(S, T - 1 + window)
    lse = 4 * q.numel() // max(1, q.shape[-1]) if inputs.return_lse else 0
    more = nbytes(inputs.sinks, inputs.q_scale, inputs.k_scale, inputs.v_scale)
    read = nbytes(q) + nbytes(k, inputs.v) * keys_read / max(1, S) + more
    return Traffic(read, max(2, q.element_size()) * q.numel() + lse)
