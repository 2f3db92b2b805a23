"""Over library: the weight is laid out once, at load, in the blocks that oneDNN's CPU kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

# The M for which oneDNN chooses the layout; the result serves every M. 16, 64 and 512 were equally fast at M = 1, 8 and
# 512; 1 was slower in fp32 at each of them, up to 2.3 times. Medians on two cores of an AMD EPYC with AVX-512, torch
# 2.13.0, cold weights, the four products of a SmolLM2-135M layer (in brackets torch.nn.functional.linear): fp32 M=1
# 258 us (831), M=512 7.5 ms (18.2); bf16 M=1 205 us (302), M=512 3.7 ms (3.9). A call costs 10 us more than its work,
# torch.mm's 1 us.
LAYOUT_M = 64


@dataclass(frozen=True)
class PackedWeight:
    """A (K, N) weight in oneDNN's own layout, which other kernels cannot read."""

    tensor: torch.Tensor
    """(N, K), in a layout known only to oneDNN."""
    K: int
    N: int
    nbytes: int
    """Bytes of its elements; oneDNN may add padding."""

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N), the shape of the original weight."""
        return self.K, self.N


def pack(b: torch.Tensor) -> PackedWeight:
    """`b` reordered for oneDNN.  b: (K, N), fp32 or bf16, on the CPU; raises `ValueError` on other tensors."""
    reason = _why_not(b)
    if reason:
        raise ValueError(f"b: {reason}")
    check_shape("b", b, None, None)
    K, N = b.shape
    packed = torch.ops.mkldnn._reorder_linear_weight(b.detach().mT.contiguous(), LAYOUT_M)
    return PackedWeight(packed, K, N, nbytes(b))


def _why_not(b: torch.Tensor) -> str | None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch was built without oneDNN"
    if b.dtype not in (torch.float32, torch.bfloat16):
        return f"oneDNN packs fp32 and bf16 here, got {b.dtype}"
    if b.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN does not multiply bf16 on this CPU"
    return None


def unsupported(inputs: Arguments) -> str | None:
    """Why these operands cannot be packed, or None; b may be packed already."""
    b = inputs.b
    return _why_not(b.tensor if isinstance(b, PackedWeight) else b)


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once; the weight was packed at load."""
    a, b = inputs.a, inputs.b
    M, N = a.shape[0], b.shape[1]
    return Traffic(read_bytes=nbytes(a, inputs.bias) + b.nbytes, write_bytes=M * N * a.element_size())


@register(
    op="gemm", name="packed", role="optimized", backend="torch", devices=("cpu",), prepare=pack,
    unsupported=unsupported, traffic=traffic,
)  # fmt: skip
def gemm(a: torch.Tensor, b: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a b + bias with a weight from `pack`.

    a: (M, K) fp32 or bf16; b: packed from (K, N); bias: (N,); returns (M, N); oneDNN's call takes no `out`.  Raises
    `ValueError` on a weight that is not packed, or on wrong shapes or dtypes.
    """
    if not isinstance(b, PackedWeight):
        raise ValueError(f"b: expected a weight packed by this kernel's prepare, got {type(b).__name__}")
    check_shape("a", a, None, b.K)
    check_float("a", a)
    check_dtype("a", a, b.tensor.dtype)
    if bias is not None:
        check_shape("bias", bias, b.N)
        check_dtype("bias", bias, a.dtype)
        check_last_dim_contiguous("bias", bias)
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b.tensor, bias, "none", [], "")
    return result
