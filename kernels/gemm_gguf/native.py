"""Implements the kernel `native` in C++ for the CPU: multiplies codes as they are stored (AVX512-VNNI), or in fp32."""

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
from rooflab.reference.quantization import unpack_int4
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

SOURCE = Path(__file__).with_suffix(".cpp")
PANELS_AT_ONCE = 16
WORD_BYTES = 4
"""A word has the codes of 4 values along K, or with 4 bits a code, of 8."""


@dataclass(frozen=True)
class CodePanels(Packed):
    """A weight of 4-bit or 8-bit codes in panels of 32 columns, with scales and minimums.

    `tensor`: [ceil(N / 32), bytes of a row / 4, 32] int32 words.  A word has 4 or 8 codes of one column."""

    scales: Tensor
    """[ceil(N / 32), groups, 32], in the dtype of the op's `scale`."""
    minimums: Tensor | None
    """The minimums, with the shape and dtype of `scales`, or None."""

    @property
    def nbytes(self) -> int:
        """Returns the bytes of codes, scales and minimums, with padding."""
        return self.tensor.nbytes + nbytes(self.scales, self.minimums)


def pack(b: Tensor, scale: Tensor, minimum: Tensor | None) -> CodePanels:
    """Packs codes `b`, int8 (N, K) or uint8 (N, K/2), with scales and minimums.  Raises `ValueError` if `b` is no
    matrix."""
    check_shape("b", b, None, None)
    # Some rows at a time, so that the unpacked codes of a large weight take little memory.
    words = torch.cat([_by_panel(_words(rows)) for rows in torch.split(b, PANEL * PANELS_AT_ONCE)])
    dtype = scale.dtype if minimum is None or minimum.dtype == scale.dtype else torch.float32
    minimums = None if minimum is None else _by_panel(minimum.to(dtype))
    return CodePanels(words, tuple(b.shape), b.dtype, _by_panel(scale.to(dtype)), minimums)


def _words(b: Tensor) -> Tensor:
    """Returns unsigned codes `[N, words]`, 4 or 8 in an int32 word.  A signed code becomes 128 larger."""
    if b.dtype == torch.int8:
        return (b.contiguous().view(torch.uint8) ^ 128).view(torch.int32)
    # A byte has the codes of k and k + 4, so that a word gives two vectors of four neighbours.
    halves = unpack_int4(b).view(len(b), b.shape[1] // WORD_BYTES, 2, WORD_BYTES)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).view(torch.int32)


def _by_panel(rows: Tensor) -> Tensor:
    """Returns `rows` `[N, columns]` as panels `[ceil(N / 32), columns, 32]`.  Zeros follow the last row."""
    padded_rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PANEL))
    return padded_rows.view(len(padded_rows) // PANEL, PANEL, rows.shape[1]).mT.contiguous()


def shape(of: Arguments) -> Any:
    """Returns the numbers that the C++ function gets: sizes, bits of a code, strides and the number of threads."""
    (M, K), N, bits = of.a.shape, of.c.shape[1], 4 if of.b.dtype == torch.uint8 else 8
    return sizes(M, N, K, K // of.scale.shape[1], bits, of.a.stride(0), of.c.stride(0), torch.get_num_threads())


def traffic(inputs: Arguments) -> Traffic:
    """Returns the traffic: each operand is read once, and the result is written once."""
    a, b = inputs.a, inputs.b
    read_bytes = nbytes(a, inputs.scale, inputs.minimum, inputs.bias) + b.shape[0] * b.shape[1]
    return Traffic(read_bytes, len(a) * b.shape[0] * a.element_size())


@kernel(
    backend="cpp",
    devices=("cpu",),
    prepare=pack,
    packed=CodePanels,
    bind=shape,
    traffic=traffic,
    holds=along_k("a"),
    over="naive",
    shows={"": 'calls("naive").total >= 5 and calls("native").names.keys() <= {"empty", "empty_like"}'},
)
def native(
    a: Tensor, b: CodePanels, scale: Tensor, minimum: Tensor | None, bias: Tensor | None, c: Tensor, *, bound: Any
) -> None:
    """Computes `a @ W^T + bias` with exact codes and fp32 sums, rounded once.  `b` is from `pack`."""
    data_pointers = (None if arg is None else arg.data_ptr() for arg in (a, b.tensor, b.scales, b.minimums, bias, c))
    built(SOURCE, "ippppppp")(DTYPE_CODES[b.scales.dtype], *data_pointers, bound)
