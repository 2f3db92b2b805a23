"""Writes results of row-wise kernels with torch, and quantises them to 8 bits."""

from __future__ import annotations

import torch

MAX_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The number to which the largest magnitude of a row is scaled, for each 8-bit dtype."""
MIN_ROW_SCALE = 2.0**-126
"""The smallest normal fp32 number, which is the smallest scale: 1 / scale would overflow for a smaller scale."""


def write_rows(values: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Writes fp32 `values` `[T, N]` to `out` with torch.  If `scale` `[T]` is given, quantises each row."""
    if scale is None:
        out.copy_(values)
        return
    row_maximum = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    scale.copy_(torch.where(row_maximum > 0, (row_maximum / MAX_CODES[out.dtype]).clamp(min=MIN_ROW_SCALE), 1.0))
    row_codes = values / scale[:, None]
    out.copy_(row_codes.round() if out.dtype == torch.int8 else row_codes)
