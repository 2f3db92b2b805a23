"""The kernel `library` calls torch's matmul with an int8 weight, `torch._weight_int8pack_mm`.

On a CPU with AVX-512 or AVX2, codes become fp32 in registers.  Codes are read once per four rows of `a`.  On CUDA
(torch 2.9 on), one thread computes one output in fp32.  Tensor cores are much faster.

Preliminary times on one busy core of an AMD EPYC with AVX-512 (M=1, N=K=4096, torch 2.13.0, minimum of 60 calls): this
kernel takes 1.6 ms.  torch.nn.functional.linear in bf16 takes 3.6 ms, or 2.7 ms with a weight packed for oneDNN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.traffic import steps
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

CPU_K_MULTIPLE = 16
"""The number of values along K that the CPU's kernel reads at once, without a mask for the end of a row."""
CPU_ROWS_PER_B_READ = 4
CPU_ALIGNMENT = {"a": 32, "b": 16}
"""On a CPU, the address of every row must be a multiple of this many bytes, for aligned loads."""
CUDA_MAX_ELEMENTS = 2**31
"""The CUDA kernel takes only operands with fewer elements than this, because it counts in 32 bits."""


def traffic(inputs: Arguments) -> Traffic:
    """Counts the moved bytes.  On a CPU, the codes move once per four rows of `a`.  On CUDA, the activation, the scales
    and the result also move as fp32 copies."""
    a, b, scale = inputs.a, inputs.b, inputs.scale
    M, N = a.shape[0], b.shape[1]
    if inputs.device == "cpu":
        return Traffic(read_bytes=nbytes(a, scale) + -(-M // CPU_ROWS_PER_B_READ) * nbytes(b), write_bytes=2 * M * N)
    fp32_bytes = 4 * a.numel()
    matmul_bytes = (fp32_bytes + nbytes(b) + 4 * N, 4 * M * N)
    return steps((nbytes(a), fp32_bytes), (nbytes(scale), 4 * N), matmul_bytes, (4 * M * N, 2 * M * N))


def why_not_taken(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Returns why torch (2.11 to 2.13) cannot take the operands, or None.  At some K it would read past a row's end."""
    if bias is not None:
        return "bias: expected none, because torch has no call that adds a bias before it rounds"
    if not a.is_contiguous() or not b.mT.is_contiguous():
        return f"a, b: expected contiguous a and b.mT, got strides {a.stride()} and {b.mT.stride()}"
    if a.device.type == "cuda":
        is_large = max(a.numel(), b.numel(), a.shape[0] * b.shape[1]) >= CUDA_MAX_ELEMENTS
        return "a, b: expected fewer than 2**31 elements for torch's kernel for CUDA, got more" if is_large else None
    if scale.dtype != a.dtype:
        return f"scale: expected a scale of the activation's dtype on a CPU, got {scale.dtype}"
    if a.shape[1] % CPU_K_MULTIPLE:
        return f"a: expected K in multiples of {CPU_K_MULTIPLE} on a CPU, or torch reads past the row, got {a.shape[1]}"
    for name, operand in (("a", a), ("b", b)):
        if not operand.is_meta and operand.data_ptr() % CPU_ALIGNMENT[name]:
            return f"{name}: expected an address of a multiple of {CPU_ALIGNMENT[name]} bytes on a CPU, got another"
    return None


@kernel(
    backend="torch",
    traffic=traffic,
    aligned=("a", "b"),
    unsupported=lambda inputs: why_not_taken(inputs.a, inputs.b, inputs.scale, inputs.bias),
)
def library(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `a @ (scale * b)` by `torch._weight_int8pack_mm`, summed in fp32.  torch's function has no `out`."""
    M, N = a.shape[0], b.shape[1]
    return torch._weight_int8pack_mm(a, b.mT, scale) if M and N else a.new_empty((M, N))
