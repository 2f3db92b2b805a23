"""The traffic of the rmsnorm kernels that read x once."""

from __future__ import annotations

from rooflab.kernels._rows import written_bytes
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """x is read and the result written; the weight comes from L1 or L2 after the first row."""
    x = inputs.x
    return Traffic(nbytes(x, inputs.weight), written_bytes(x, x.numel(), inputs.quantize))
