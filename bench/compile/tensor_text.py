"""Describes a tensor of the command line, such as `64x96:bf16:transposed`, and makes it with random values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
_SHAPE = re.compile(r"\d+(x\d+)*")
TENSOR_PATTERN = re.compile(rf"{_SHAPE.pattern}:({'|'.join(DTYPES)})(:[a-z]+(=[\dx.+-]+)?)*")
"""A tensor with its dtype, in a text that may also be another value."""
_SETTINGS = "transposed, strides=96x1, offset=8 or range=0..9"
_SMALL_DTYPES, _DEFAULT_RANGE = (torch.int8, torch.uint8, torch.bool), (0, 9)
"""The integer dtypes whose values are any, and the range of the others, which are often indices."""


@dataclass(frozen=True)
class TensorText:
    """Describes a tensor: `64x96`, then a dtype, then settings, all separated by `:`.

    The settings: `transposed` (the last two dimensions are swapped in memory), `strides=128x1` (in elements, as of
    padded rows; 0 repeats one element), `offset=8` (elements of the memory before the tensor), and for integers
    `range=0..9` (the least and the greatest value)."""

    text: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    offset: int
    value_range: tuple[int, int] | None
    """The least and the greatest integer; None for floats."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, name: str, text: str, dtype: str = "fp32") -> TensorText:
        """Parses the text of the tensor `name`; `dtype` is the dtype if the text has none.

        Raises `ValueError` with the part of the text that is wrong."""
        shape_text, *parts = text.split(":")
        if not _SHAPE.fullmatch(shape_text):
            raise ValueError(f"shape: expected {name}=64x96 or {name}=64x96:bf16, got {name}={text}")
        if parts and parts[0].partition("=")[0] not in ("transposed", "strides", "offset", "range"):
            dtype = parts.pop(0)
        if dtype not in DTYPES:
            raise ValueError(f"shape: expected one of {', '.join(DTYPES)} as the dtype of {name}, got {dtype!r}")
        shape = _sizes(shape_text)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        offset, value_range = 0, None if DTYPES[dtype].is_floating_point else _DEFAULT_RANGE
        if DTYPES[dtype] in _SMALL_DTYPES:
            value_range = _limits(DTYPES[dtype])
        for part in parts:
            key, _, value = part.partition("=")
            if part == "transposed" and len(shape) > 1:
                strides[-2:] = [1, shape[-2]]
            elif key == "strides" and _SHAPE.fullmatch(value) and len(_sizes(value)) == len(shape):
                strides = list(_sizes(value))
            elif key == "offset" and value.isdecimal():
                offset = int(value)
            elif key == "range":
                value_range = _range(name, value, dtype)
            else:
                raise ValueError(f"shape: expected {_SETTINGS} after {name}={shape_text}:{dtype}, got {part!r}")
        return cls(":".join([shape_text, dtype, *parts]), shape, dtype, tuple(strides), offset, value_range)

    def filled(self, generator: torch.Generator) -> torch.Tensor:
        """Makes the tensor on the CPU.  Floats are normally distributed; integers are uniform in their range."""
        last_index = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory_elements = self.offset + (last_index + 1 if math.prod(self.shape) else 0)
        if self.value_range is None:
            memory = torch.randn(memory_elements, generator=generator)
        else:
            low, high = self.value_range
            memory = torch.randint(low, high + 1, (memory_elements,), generator=generator)
        return memory.to(DTYPES[self.dtype]).as_strided(self.shape, self.strides, self.offset)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _range(name: str, text: str, dtype: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text)
    if DTYPES[dtype].is_floating_point or match is None:
        raise ValueError(f"shape: expected range=LOW..HIGH and an integer dtype for {name}, got {dtype}:range={text}")
    low, high = int(match[1]), int(match[2])
    least, greatest = _limits(DTYPES[dtype])
    if not least <= low <= high <= min(greatest, 2**63 - 2):
        raise ValueError(f"shape: expected a range within {least}..{greatest} for {name}, got range={text}")
    return low, high
