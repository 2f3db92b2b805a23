"""torch's own product with a weight of int8: `torch._weight_int8pack_mm`.

On a CPU with AVX-512 or AVX2 the codes become fp32 in registers, and only they are read from memory; four rows of a
share what was read.  Preliminary, least of 60 interleaved calls on one busy core of an AMD EPYC with AVX-512, torch
2.13.0, M=1, N=K=4096, three weights in turn: 1.6 ms, beside 3.6 ms of torch.nn.functional.linear in bf16 and 2.7 ms of
one packed for oneDNN; the codes alone take 0.7 ms at the rate of a sum over fp32.  On CUDA (torch 2.9 on) it is one
thread an output, over an activation converted to fp32 first: right at every shape, and no rival to a product of tensor
cores.
"""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._traffic import steps
from rooflab.kernels.gemm_w8a16._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

CPU_STEP = 16
"""Values along K that the CPU's kernel reads at once, with no mask at the end of a row."""
CPU_ROWS = 4
CPU_ALIGNMENT = {"a": 32, "b": 16}
"""Bytes of which its aligned loads want every row's address to be a multiple."""
CUDA_LIMIT = 2**31
"""Elements of an operand, which the kernel on CUDA counts in 32 bits."""


def traffic(inputs: Arguments) -> Traffic:
    """On a CPU the codes again for every four rows of a; on CUDA three steps, the activation and the result in fp32."""
    a, b, scale = inputs.a, inputs.b, inputs.scale
    M, N = a.shape[0], b.shape[1]
    if inputs.device == "cpu":
        return Traffic(read_bytes=nbytes(a, scale) + -(-M // CPU_ROWS) * nbytes(b), write_bytes=2 * M * N)
    wide = 4 * a.numel()
    product = (wide + nbytes(b) + 4 * N, 4 * M * N)
    return steps((nbytes(a), wide), (nbytes(scale), 4 * N), product, (4 * M * N, 2 * M * N))


def why_not_taken(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """What torch (2.11 to 2.13) takes; on a CPU it reads past rows of another length without a word."""
    if bias is not None:
        return "torch has no call that adds a bias before it rounds"
    if not a.is_contiguous() or not b.mT.is_contiguous():
        return "torch takes a and b.mT contiguous"
    if a.device.type == "cuda":
        large = max(a.numel(), b.numel(), a.shape[0] * b.shape[1]) >= CUDA_LIMIT
        return "torch's kernel for CUDA takes operands of fewer than 2**31 elements" if large else None
    if scale.dtype != a.dtype:
        return f"torch takes a scale of the activation's dtype on a CPU, got {scale.dtype}"
    if a.shape[1] % CPU_STEP:
        return f"torch takes K in multiples of {CPU_STEP} on a CPU, and reads past the row otherwise, got {a.shape[1]}"
    for name, tensor in (("a", a), ("b", b)):
        if not tensor.is_meta and tensor.data_ptr() % CPU_ALIGNMENT[name]:
            return f"torch takes {name} at an address of a multiple of {CPU_ALIGNMENT[name]} bytes on a CPU"
    return None


@register(
    op="gemm_w8a16", name="library", role="library", backend="torch", traffic=traffic,
    unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b, inputs.scale, inputs.bias),
)  # fmt: skip
def gemm_w8a16(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a (scale b) with `torch._weight_int8pack_mm`, summed in fp32.

    a: (M, K) bf16; b: (K, N) int8, a transposed contiguous weight; scale: (N,) bf16; returns (M, N) bf16; torch's call
    takes no `out`.  Raises `ValueError` on anything else, a bias among it.
    """
    M, N, _ = check_operands(a, b, scale, bias)
    reason = why_not_taken(a, b, scale, bias)
    if reason:
        raise ValueError(f"{'bias' if bias is not None else 'a'}: {reason}")
    if not M or not N:
        return output(None, (M, N), a)
    return torch._weight_int8pack_mm(a, b.mT, scale)
