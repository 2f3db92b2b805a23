"""The traffic of the fused_add_rmsnorm kernels with one pass."""

from __future__ import annotations

from rooflab.kernels._rows import written_bytes
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Two arrays are read and two written; the weight comes from L1 or L2 after the first row."""
    x = inputs.x
    written = nbytes(x) + written_bytes(x, x.numel(), inputs.quantize)
    return Traffic(nbytes(x, inputs.residual, inputs.weight), written)
