"""Memory that reveals wrong reads and writes: guards around tensors, poison in unwritten places, exact comparison."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

GUARD_BYTES = 65536
"""Bytes of a guard, one on each side of a tensor. A page of a small model's KV cache is smaller, so slot -1 hits it."""
ROW_PADDING = 16
"""Elements added to each stride of a padded layout; a multiple of 16 bytes in every dtype, so alignment is kept."""
NAN_BYTE = 0xFF
"""Bytes of ones are a NaN in every float dtype and -1 in an integer: an index from outside its table hits a guard."""
SENTINEL_BYTE = 0x7B
"""The fill of an integer output: large in every width, and never a token, a slot or a length of the inputs."""


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger buffer; all other bytes of the buffer are poison."""

    buffer: torch.Tensor
    """(n,): a guard, the tensor's storage with poison in its gaps, a guard."""
    pristine: torch.Tensor
    """A copy of the buffer as it was at first."""
    view: torch.Tensor
    """The tensor itself."""

    def rewrite(self, tensor: torch.Tensor) -> None:
        """Writes other values of the same shape to the same addresses, without a new version of the tensor.

        Kernels write in this way: Triton and CUDA code do not change torch's version counter.
        """
        single = _single(self.view.stride())
        pristine = self.pristine.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        for view in (self.view.data, pristine):
            view[single].copy_(tensor[single])

    def damage(self, *, may_change: bool) -> str | None:
        """Describes a forbidden write, or returns None.  With `may_change` the tensor's own elements may change."""
        start = self.view.storage_offset()
        end = start + self.view.numel()
        if not may_change and same_bits(self.buffer, self.pristine):
            return None
        if may_change and self.view.is_contiguous():  # no gaps: only the guards can be wrong
            sides = ((tensor[:start], tensor[end:]) for tensor in (self.buffer, self.pristine))
            if all(same_bits(*pair) for pair in zip(*sides, strict=True)):
                return None
        expected = self.pristine.clone()
        view = expected.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        if may_change:
            view.copy_(self.view)
        actual_bits, expected_bits = bits(self.buffer), bits(expected)
        if same_bits(self.buffer, expected):
            return None
        if not same_bits(self.view, view):
            return "was changed"
        first_byte = int((actual_bits != expected_bits).nonzero()[0])
        place = first_byte // self.buffer.element_size() - self.view.storage_offset()
        return f"memory outside it was written, first at element {place} from its start"


def guard(tensor: torch.Tensor, *, padded: bool = False) -> Guarded:
    """A copy of `tensor` between guards, with the same strides and alignment; with `padded`, with longer strides."""
    strides = _padded_strides(tensor) if padded else tensor.stride()
    # A misaligned view stays misaligned: kernels specialise on 16 bytes.
    skew = tensor.data_ptr() % 16 // tensor.element_size()
    buffer, view = _allocate(tuple(tensor.shape), tuple(strides), tensor.dtype, tensor.device, NAN_BYTE, skew)
    if tensor.numel():
        single = _single(tuple(strides))
        view[single].copy_(tensor[single])
    return Guarded(buffer, buffer.clone(), view)


def guard_output(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    padded: bool = False,
    stale: torch.Tensor | None = None,
) -> Guarded:
    """An output between guards, full of NaN, or of the sentinel for integers; with `padded`, not contiguous.

    With `stale` it holds these values of an earlier answer, like memory that a caller uses again.
    """
    model = torch.empty(shape, dtype=dtype, device="meta")
    strides = _padded_strides(model) if padded else model.stride()
    byte = NAN_BYTE if dtype.is_floating_point else SENTINEL_BYTE
    buffer, view = _allocate(shape, tuple(strides), dtype, device, byte, 0)
    if stale is not None:
        view.copy_(stale)
    return Guarded(buffer, buffer.clone(), view)


def _allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, byte: int, skew: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer, full of poison, and the view in its middle."""
    extent = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    side = GUARD_BYTES // dtype.itemsize
    raw = torch.full(((2 * side + skew + extent) * dtype.itemsize,), byte, dtype=torch.uint8, device=device)
    buffer = raw.view(dtype)
    return buffer, buffer.as_strided(shape, strides, side + skew)


def _single(strides: tuple[int, ...]) -> tuple[int | slice, ...]:
    """An index that selects each element in memory once: of an expanded dimension only the first position."""
    return tuple(0 if stride == 0 else slice(None) for stride in strides)


def wipe(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites outputs that are no longer needed with poison, so that a kernel that returns one again fails."""
    with torch.inference_mode():
        for tensor in tensors:
            if tensor.numel() and torch._debug_has_internal_overlap(tensor) != 1:
                tensor.fill_(torch.nan if tensor.dtype.is_floating_point else SENTINEL_BYTE)


def _padded_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Longer strides in the same order; no stride follows from the sizes alone."""
    strides = list(tensor.stride())
    if tensor.ndim < 2 or tensor.numel() == 0 or 0 in strides:
        return tuple(strides)
    order = sorted(range(tensor.ndim), key=lambda dim: (strides[dim], -dim))
    step = 1
    for dim in order:
        strides[dim] = step
        step = step * tensor.shape[dim] + ROW_PADDING
    return tuple(strides)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes (n,): a NaN then equals itself, and -0.0 differs from 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one size hold the same bytes; eight at a time, for single ones take 4 times as long."""
    pair = bits(one), bits(other)
    if all(part.numel() % 8 == part.storage_offset() % 8 == 0 for part in pair):
        pair = pair[0].view(torch.int64), pair[1].view(torch.int64)
    return torch.equal(*pair)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Makes `torch.empty` give NaN, or the largest integer.

    PyTorch fills uninitialised memory in its deterministic mode. This mode also changes the algorithms of a few ops, so
    compare the bits of two runs only outside of it.
    """
    mode = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
        torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` imports Inductor, which takes 2 s
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            switch.fill_uninitialized_memory = fill
