"""Memory that shows who touched it: guards around tensors, poison where nothing was written, bits compared as bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

GUARD_BYTES = 65536
"""On each side of a tensor: more than a page of a KV cache for a small model, so that slot -1 lands in it."""
ROW_PADDING = 16
"""Elements added to each stride of a padded layout; a multiple of 16 bytes in every dtype, so alignment is kept."""
NAN_BYTE = 0xFF
"""All ones are a NaN in every float dtype, and -1 in an integer: an index read outside its table lands in a guard."""
SENTINEL_BYTE = 0x7B
"""An integer output is filled with it: large in every width, and never a token, a slot or a length of ours."""


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger buffer, whose every other byte is poison."""

    buffer: torch.Tensor
    """(n,): guard, the tensor's storage with poison in its gaps, guard."""
    pristine: torch.Tensor
    """What the buffer held at first."""
    view: torch.Tensor
    """The tensor itself."""

    def rewrite(self, tensor: torch.Tensor) -> None:
        """Puts other values of the same shape at the same addresses, with no new version of the tensor.

        Kernels write so: Triton and CUDA code leave torch's version counter as it was.
        """
        single = _single(self.view.stride())
        pristine = self.pristine.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        for view in (self.view.data, pristine):
            view[single].copy_(tensor[single])

    def damage(self, *, may_change: bool) -> str | None:
        """What was written that should not have been, in words, or None.

        With `may_change` the tensor's own elements may have changed, and only what lies around them may not.
        """
        if not may_change and torch.equal(bits(self.buffer), bits(self.pristine)):
            return None
        expected = self.pristine.clone()
        view = expected.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        if may_change:
            view.copy_(self.view)
        found, wanted = bits(self.buffer), bits(expected)
        if torch.equal(found, wanted):
            return None
        if not torch.equal(bits(self.view), bits(view)):
            return "was changed"
        place = int((found != wanted).nonzero()[0]) // self.buffer.element_size() - self.view.storage_offset()
        return f"memory outside it was written, first at element {place} from its start"


def guard(tensor: torch.Tensor, *, padded: bool = False) -> Guarded:
    """A copy of `tensor` with guards around it, of the same strides and alignment; with `padded`, of longer strides."""
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
    """An output to write to, full of NaN, or of a sentinel where it is of integers; with `padded`, not contiguous.

    With `stale`, an answer to something else, it holds that, as where a caller uses its memory again.
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
    """The buffer, poison all over, and the view in its middle."""
    extent = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    side = GUARD_BYTES // dtype.itemsize
    raw = torch.full(((2 * side + skew + extent) * dtype.itemsize,), byte, dtype=torch.uint8, device=device)
    buffer = raw.view(dtype)
    return buffer, buffer.as_strided(shape, strides, side + skew)


def _single(strides: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Selects each element in memory once: an expanded dimension has one, and is not written through all its views."""
    return tuple(0 if stride == 0 else slice(None) for stride in strides)


def wipe(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites outputs that were read and are no longer needed: a kernel that returns one again returns poison."""
    with torch.inference_mode():
        for tensor in tensors:
            if tensor.numel() and torch._debug_has_internal_overlap(tensor) != 1:
                tensor.fill_(torch.nan if tensor.dtype.is_floating_point else SENTINEL_BYTE)


def _padded_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the same order in which no dimension follows from the sizes of the others."""
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
    """The tensor's elements as bytes (n,), so that a NaN equals itself and -0.0 differs from 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Makes `torch.empty` give NaN, or the largest integer.

    PyTorch fills uninitialised memory under its deterministic mode, which also picks other algorithms for a few of its
    own ops; so whether two runs agree is to be asked outside of this.
    """
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)
            switch.fill_uninitialized_memory = fill
