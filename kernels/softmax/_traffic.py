"""The traffic of the softmax kernels with one pass."""

from __future__ import annotations

from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """x is read and the result written."""
    return Traffic(nbytes(inputs.x), nbytes(inputs.x))
