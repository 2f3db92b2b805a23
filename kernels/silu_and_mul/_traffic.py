"""The traffic of gated activations with one pass."""

from __future__ import annotations

from rooflab.kernels._rows import written_bytes
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """gate and up are read, the result is written."""
    x = inputs.x
    return Traffic(nbytes(x), written_bytes(x, x.numel() // 2, inputs.quantize))
