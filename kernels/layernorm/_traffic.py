"""The traffic of the layernorm kernels with one pass."""

from __future__ import annotations

from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """x is read and the result written; weight and bias come from L2 after the first row."""
    return Traffic(nbytes(inputs.x, inputs.weight, inputs.bias), nbytes(inputs.x))
