"""Implements the kernel `native` in C++ for the CPU.  Codes become exact bf16 or fp32 values in registers.

With AVX512-BF16, one instruction converts two neighbouring codes to bf16 for 16 columns.  Otherwise codes become fp32.
A scale multiplies the fp32 sum of its group, so no weight is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.gemm._operands import along_k
from rooflab.kernels.gemm.native import PANEL
from rooflab.kernels.launcher import kernel
from rooflab.reference.contract import Packed
from rooflab.reference.gemm_w4a16 import group_size
from rooflab.reference.quantization import INT4_ZERO, unpack_int4
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

SOURCE = Path(__file__).with_suffix(".cpp")
WORD = 8
"""The number of codes in a 32-bit word."""


@dataclass(frozen=True)
class Int4Panels(Packed):
    """A weight of four-bit codes (N, K/2) in panels of 32 columns, with its scales and zero points.

    `tensor`: (N / 32 rounded up, K / 8, 32) int32 words.  K is padded to whole groups, with codes of zero.
    """

    scales: Tensor
    """(N / 32, groups, 32), in the dtype of the op's `scale`."""
    zeros: Tensor | None
    """(N / 32, groups, 32) uint8, or None."""

    @property
    def nbytes(self) -> int:
        """Returns the bytes of codes, scales and zero points, with padding."""
        return self.tensor.nbytes + nbytes(self.scales, self.zeros)


def pack(b: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> Int4Panels:
    """Packs `b` (N, K/2) uint8 with the op's scale and zero.  Raises `ValueError` on another dtype or shape."""
    check_shape("b", b, None, None)
    check_dtype("b", b, torch.uint8)
    (N, K), group_count = (b.shape[0], 2 * b.shape[1]), scale.shape[1]
    padded_k = group_count * group_size(K, group_count)
    panel_count = -(-N // PANEL)
    padded_codes = torch.full((panel_count * PANEL, padded_k), INT4_ZERO, dtype=torch.int32, device=b.device)
    padded_codes[:N, :K] = unpack_int4(b)
    if zero is not None and K < padded_k:
        padded_codes[:N, K:] = zero[:, -1:]
    # A word's four-bit field j has k = 2 j, and the field j + 4 has k = 2 j + 1.
    word_codes = padded_codes.view(panel_count, PANEL, padded_k // WORD, WORD // 2, 2).permute(0, 2, 1, 4, 3).flatten(3)
    code_shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=b.device)
    packed_words = (word_codes.long() << code_shifts).sum(-1)
    packed_words = torch.where(packed_words >= 2**31, packed_words - 2**32, packed_words).int()

    def by_panel(values: Tensor) -> Tensor:
        padded_values = torch.zeros(panel_count * PANEL, group_count, dtype=values.dtype, device=values.device)
        padded_values[:N] = values
        return padded_values.view(panel_count, PANEL, group_count).mT.contiguous()

    zeros = None if zero is None else by_panel(zero)
    return Int4Panels(packed_words.contiguous(), (N, K // 2), b.dtype, by_panel(scale), zeros)


def shape(of: Arguments) -> Any:
    """Returns the numbers that the C++ function gets: sizes, strides and the number of threads."""
    (M, N), group_count = of.c.shape, of.scale.shape[1]
    group = group_size(of.a.shape[1], group_count)
    return sizes(M, N, group_count * group, group, of.a.stride(0), of.c.stride(0), torch.get_num_threads())


def traffic(inputs: Arguments) -> Traffic:
    """Returns the traffic: each operand is read once, and the result is written once."""
    a, (N, half_k) = inputs.a, inputs.b.shape
    read_bytes = nbytes(a, inputs.scale, inputs.zero, inputs.bias) + N * half_k
    return Traffic(read_bytes, len(a) * N * a.element_size())


@kernel(
    backend="cpp",
    devices=("cpu",),
    prepare=pack,
    packed=Int4Panels,
    bind=shape,
    traffic=traffic,
    holds=along_k("a"),
    over="naive",
    shows={"": 'calls("naive").total >= 8 and calls("native").names.keys() <= {"empty", "empty_like"}'},
)
def native(
    a: Tensor, b: Int4Panels, scale: Tensor, zero: Tensor | None, bias: Tensor | None, c: Tensor, *, bound: Any
) -> None:
    """Computes `a @ W + bias` in fp32, rounded once.  `b` is from `pack` and contains scale and zero."""
    data_pointers = (None if arg is None else arg.data_ptr() for arg in (a, b.tensor, b.scales, b.zeros, bias, c))
    built(SOURCE, "ipppppppn")(DTYPE_CODES[b.scales.dtype], *data_pointers, bound, a.shape[1])
