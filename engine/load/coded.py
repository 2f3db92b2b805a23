"""Holds a weight as 4-bit or 8-bit codes with scales, as the op gemm_gguf takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from rooflab.reference.quantization import dequantize_groups, quantize_groups, unpack_int4

GROUP = 32
"""The number of codes along K that share a scale with the dtypes int4 and int8, as in GGUF's Q4_1 and Q8_0."""

CODE_DTYPES = ("int8", "int4")
"""The dtypes that quantise weights.  The dtype `keep` takes the codes of a file instead."""
VALUES_AT_ONCE = 2**18
"""The number of values that are dequantised at once: 2 MB in fp64.  The whole weight would take 16 times its codes."""


@dataclass(frozen=True)
class CodedWeight:
    """A weight `[N, K]` as codes with scales and minimums: `W = scale * code - minimum` (`reference/gemm_gguf.py`)."""

    codes: torch.Tensor
    """uint8 `[N, K / 2]`, two 4-bit codes in a byte, or int8 `[N, K]`."""
    scale: torch.Tensor
    """fp16 or fp32, `[N, groups]`."""
    minimum: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Returns N and K."""
        N, columns = self.codes.shape
        return N, 2 * columns if self.codes.dtype == torch.uint8 else columns

    def in_rows(self, order: Callable[[torch.Tensor], torch.Tensor]) -> CodedWeight:
        """Returns the weight with its rows in another order.  `order` reorders the rows of a tensor."""
        minimum = None if self.minimum is None else order(self.minimum)
        return CodedWeight(order(self.codes), order(self.scale), minimum)

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the weight in `dtype`."""
        weight = torch.empty(self.shape, dtype=dtype)
        for rows in row_blocks(self):
            part = self.in_rows(itemgetter(rows))
            weight[rows] = dequantize_groups(part.codes, part.scale, part.minimum)
        return weight


Weight = torch.Tensor | CodedWeight


def row_blocks(weight: Weight) -> list[slice]:
    """Divides the rows of `weight` into blocks of at most `VALUES_AT_ONCE` values, or of one row."""
    N, K = weight.shape
    num_rows = max(1, VALUES_AT_ONCE // K)
    return [slice(first, first + num_rows) for first in range(0, N, num_rows)]


def coded(weight: Weight, dtype: str) -> CodedWeight:
    """Quantises `weight` `[N, K]` in groups of 32 values along K.  `int4` also has minimums, `int8` has none."""
    (N, K), is_int4 = weight.shape, dtype == "int4"
    codes = torch.empty((N, K // 2), dtype=torch.uint8) if is_int4 else torch.empty((N, K), dtype=torch.int8)
    scale = torch.empty((N, K // GROUP), dtype=torch.float16)
    minimum = torch.empty_like(scale) if is_int4 else None
    for rows in row_blocks(weight):
        values = weight[rows] if isinstance(weight, torch.Tensor) else weight.in_rows(itemgetter(rows)).values()
        codes[rows], scale[rows], low = quantize_groups(values, GROUP, 4 if is_int4 else 8, minimums=is_int4)
        if minimum is not None and low is not None:
            minimum[rows] = low
    return CodedWeight(codes, scale, minimum)


def joined(parts: Sequence[Weight]) -> Weight:
    """Joins weights `[N_i, K]` to one weight with all rows.

    Parts in several formats get the widest codes and scales and the smallest groups, which changes no value.  If a part
    has no codes, the joined weight has none."""
    if len(parts) == 1:
        return parts[0]
    coded_parts = [part for part in parts if isinstance(part, CodedWeight)]
    if plain_parts := [part for part in parts if isinstance(part, torch.Tensor)]:
        dtype = plain_parts[0].dtype
        return torch.cat([part.values(dtype) if isinstance(part, CodedWeight) else part for part in parts])
    four_bits = all(part.codes.dtype == torch.uint8 for part in coded_parts)
    group_count = max(part.scale.shape[1] for part in coded_parts)
    has_minimum = any(part.minimum is not None for part in coded_parts)
    scale_dtype = max((part.scale.dtype for part in coded_parts), key=lambda dtype: dtype.itemsize)
    codes, scales, minimums = [], [], []
    for part in coded_parts:
        part_codes, minimum = part.codes, part.minimum
        zero = 8 if part_codes.dtype == torch.uint8 and minimum is None else 0
        if part_codes.dtype == torch.uint8 and not four_bits:
            part_codes = (unpack_int4(part_codes) - zero).to(torch.int8)
            zero = 0
        if minimum is None:
            minimum = part.scale.to(scale_dtype) * zero
        repeats = group_count // part.scale.shape[1]
        codes.append(part_codes)
        scales.append(part.scale.to(scale_dtype).repeat_interleave(repeats, dim=1))
        minimums.append(minimum.to(scale_dtype).repeat_interleave(repeats, dim=1))
    return CodedWeight(torch.cat(codes), torch.cat(scales), torch.cat(minimums) if has_minimum else None)
