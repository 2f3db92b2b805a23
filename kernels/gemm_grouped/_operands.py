"""What a traffic model and a launcher of gemm_grouped need of the offsets."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.spec import Arguments


def group_rows(offsets: torch.Tensor) -> Iterator[int]:
    """Rows of each expert that has rows; waits for the device, so only traffic models use it, never a launch."""
    bounds = offsets.tolist()
    return (end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True) if end > start)


def zeros(of: Arguments) -> None:
    """Writes zeros to out, for K = 0: `empty` of kernels that need a k."""
    of.out.zero_()
