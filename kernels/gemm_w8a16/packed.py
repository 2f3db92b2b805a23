"""The kernel `packed` improves on `library` on a CPU.  For many rows of `a`, codes become bf16 in the cache.

For few rows, the kernel calls torch's own int8 matmul, which is the fastest.  For many rows, that matmul takes three
times the time of a bf16 matmul.  So this kernel converts a group of output channels to bf16, in a buffer of the size of
a core's L2.  oneDNN multiplies the buffer, and the fp32 sums are scaled.

No weight is rounded.  But with a bias, or if `scale` and `a` differ in dtype, the buffer is scaled, which rounds each
weight once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm_w8a16 import library
from rooflab.kernels.launcher import kernel
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

MAX_INT8_ROWS = 16
"""The most rows for which torch's int8 call is not slower."""
BUFFER_VALUES = 2**19
"""The number of weights that are converted at a time: 1 MiB in bf16, the L2 of a core."""
CHANNEL_MULTIPLE = 16
"""The number of output channels that are converted at a time is a multiple of this."""


def pack(b: torch.Tensor) -> torch.Tensor:
    """Stores `b` (`[K, N]` int8) as `[N, K]` with the alignment that torch needs.  Copies only if necessary.

    Raises `ValueError` on another dtype or shape."""
    check_shape("b", b, None, None)
    check_dtype("b", b, torch.int8)
    rows = b.mT.contiguous()
    if not rows.is_meta and rows.data_ptr() % library.CPU_ALIGNMENT["b"]:
        rows = rows.clone()
    return rows.mT


def traffic(inputs: Arguments) -> Traffic:
    """Returns the bytes that a call moves.  For few rows of `a`, torch's int8 matmul reads the weight once per four
    rows.  For many rows, each operand counts once.  The buffer of converted weights stays in L2 and does not count."""
    a, b, scale, bias = inputs.a, inputs.b, inputs.scale, inputs.bias
    if _few(a, b, scale, bias):
        return library.traffic(inputs.but(device="cpu"))
    return Traffic(read_bytes=nbytes(a, b, scale, bias), write_bytes=2 * a.shape[0] * b.shape[1])


def unsupported(inputs: Arguments) -> str | None:
    """Returns the reason why a call with many rows of `a` is refused, or None.  oneDNN needs a CPU with bf16, and rows
    of `a` without padding.  A call with few rows does not use oneDNN."""
    if _few(inputs.a, inputs.b, inputs.scale, inputs.bias):
        return None
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "a: expected few rows, because oneDNN does not multiply bf16 on this CPU, got many"
    return padded_rows_refused(inputs)


def _few(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Returns True if the activations `a` have at most `MAX_INT8_ROWS` rows and torch's int8 matmul takes the operands.
    That matmul is then fast."""
    return a.shape[0] <= MAX_INT8_ROWS and library.why_not_taken(a, b, scale, bias) is None


@kernel(
    backend="torch",
    devices=("cpu",),
    prepare=pack,
    unsupported=unsupported,
    aligned=("a", "b"),
    empty=epilogue_alone,
    allocates=True,
    traffic=traffic,
)
def packed(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, c: Tensor | None) -> Tensor:
    """Computes `a @ (scale * b) + bias` on a CPU.  For few rows of `a`, calls torch's int8 matmul.  For many rows,
    converts some columns of `b` at a time to the dtype of `a`, and multiplies them.  The call is fastest if `b` is
    `pack(b)`."""
    if _few(a, b, scale, bias):
        result = torch._weight_int8pack_mm(a, b.mT, scale)
        return result if c is None else c.copy_(result)
    (K, N), M = b.shape, a.shape[0]
    c = torch.empty((M, N), dtype=a.dtype) if c is None else c
    fuses_scale = bias is None and scale.dtype == a.dtype
    block_channels = min(max(BUFFER_VALUES // K // CHANNEL_MULTIPLE, 1) * CHANNEL_MULTIPLE, N)
    weight_buffer = torch.empty((block_channels, K), dtype=a.dtype)
    for first_channel in range(0, N, block_channels):
        channels = slice(first_channel, min(first_channel + block_channels, N))
        weight = weight_buffer[: channels.stop - first_channel].copy_(b.mT[channels])
        if fuses_scale:
            block_result = torch.ops.mkldnn._linear_pointwise.binary(a, scale[None, channels], weight, None, "mul")
        else:
            weight.mul_(scale[channels, None])
            block_result = torch.nn.functional.linear(a, weight, None if bias is None else bias[channels])
        c[:, channels] = block_result
    return c
