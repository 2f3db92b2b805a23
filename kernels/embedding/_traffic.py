"""The traffic of all embedding kernels."""

from __future__ import annotations

from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each distinct row is read once (L2 serves repeats), and each token's row is written."""
    token_ids, weight = inputs.token_ids, inputs.weight
    row_bytes = weight.shape[1] * weight.element_size()
    return Traffic(
        read_bytes=nbytes(token_ids) + len(set(token_ids.tolist())) * row_bytes, write_bytes=len(token_ids) * row_bytes
    )
