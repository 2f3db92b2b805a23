"""Memory that reveals wrong reads and writes: guards around tensors, poison in unwritten places, exact comparison; and
the ways in which a wrong kernel looks right, where its outputs show them.

Kernels do that by mistake, and generated ones often (Ouyang et al., KernelBench, 2025; reports in the public kernel
contests of 2025 and 2026): they keep answers between calls, finish their work after the call, or return memory that
they did not write.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core.failed import LayoutRefused
from rooflab.reference.spec import Inputs, OpSpec, Outputs, extent

GUARD_BYTES = 65536
"""Bytes of a guard, one on each side of a tensor. A page of a small model's KV cache is smaller, so slot -1 hits it."""
ROW_PADDING = 16
"""Elements added to each stride of a padded layout, times the tensor's place among the arguments, so that no two have
the same strides; a multiple of 16 bytes in every dtype, so alignment is kept."""
Arrangement = Literal["plain", "padded", "apart", "turned", "far", "far inside", "far pages"]
"""How a tensor lies in memory: as it is given; with longer strides; with every second element of a row, so that none
has stride 1; with its dimensions in the other order; with most rows more than 2**31 elements behind the first, where an
offset of 32 bits ends; and so with another dimension, such as heads; a contiguous cache whose
pages from the second on lie there."""
FAR: tuple[Arrangement, ...] = ("far", "far inside")
FAR_PAGES: Arrangement = "far pages"
FAR_STRIDE, FAR_EXTENT, FAR_MOST, FAR_ROWS, FAR_ALIGN = 2**31, 2**33, 2**37, 4096, 64
"""Of a far tensor: what its far stride does not reach, because Triton takes a stride of 2**31 in 64 bits; how far that
dimension goes; the most elements from first to last; the most rows, for each takes a page of memory; of what strides
are multiples."""
MAP_NORESERVE = 0x4000
"""mmap's flag for memory that may be more than there is (Linux)."""
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

    @property
    def own(self) -> torch.Tensor:
        """The tensor that the check compares: without pages that it only put between."""
        return self.view

    def rewrite(self, tensor: torch.Tensor) -> None:
        """Writes other values of the same shape to the same addresses, without a new version of the tensor.

        Kernels write in this way: Triton and CUDA code do not change torch's version counter.
        """
        single = _single(self.view.stride())
        for view in (self.view.data, self._place_in(self.pristine)):
            view[single].copy_(tensor[single])

    def _place_in(self, copy: torch.Tensor) -> torch.Tensor:
        """The tensor's own place in a copy of the buffer."""
        offset = self.view.storage_offset() - self.buffer.storage_offset()
        return copy.as_strided(self.view.shape, self.view.stride(), offset)

    def damage(self, *, may_change: bool) -> str | None:
        """Describes a forbidden write, or returns None.  With `may_change` the tensor's own elements may change."""
        start = self.view.storage_offset() - self.buffer.storage_offset()
        end = start + self.view.numel()
        if not may_change and same_bits(self.buffer, self.pristine):
            return None
        if may_change and self.view.is_contiguous():  # no gaps: only the guards can be wrong
            sides = ((tensor[:start], tensor[end:]) for tensor in (self.buffer, self.pristine))
            if all(same_bits(*pair) for pair in zip(*sides, strict=True)):
                return None
        expected = self.pristine.clone()
        view = self._place_in(expected)
        if may_change:
            view.copy_(self.view)
        actual_bits, expected_bits = bits(self.buffer), bits(expected)
        if same_bits(self.buffer, expected):
            return None
        if not same_bits(self.view, view):
            return "was changed"
        first_byte = int((actual_bits != expected_bits).nonzero()[0])
        place = first_byte // self.buffer.element_size() - start
        return f"memory outside it was written, first at element {place} from its start"


@dataclass(frozen=True)
class Far(Guarded):
    """A tensor whose rows lie far apart in memory that is touched only there: the buffer is the tensor itself."""

    def damage(self, *, may_change: bool) -> str | None:
        return None if may_change or same_bits(self.own, self.pristine) else "was changed"


@dataclass(frozen=True)
class FarPages(Far):
    """A contiguous cache of pages; after the first page come more than 2**31 elements of unused pages."""

    @property
    def own(self) -> torch.Tensor:
        return torch.cat((self.view[:1], self.view[1 + _gap(self.pristine) :]))


def _gap(cache: torch.Tensor) -> int:
    """The pages between the first one and the others."""
    return FAR_STRIDE // cache[0].numel() + 1


def far_slots(slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """The same slots where the pages of a cache (pages, page size, ...) lie far apart."""
    return slots + (slots >= cache.shape[1]) * (_gap(cache) * cache.shape[1])


def _far_pages(cache: torch.Tensor) -> FarPages:
    shape = (len(cache) + _gap(cache), *cache.shape[1:])
    view = _far_apart(torch.Size(shape), torch.empty(shape, device="meta").stride(), cache.dtype)
    view[:1], view[1 + _gap(cache) :] = cache[:1], cache[1:]
    return FarPages(view, cache.clone(), view)


def _far_apart(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros with these strides, 2**31 elements from both ends of memory that is taken only where it is touched."""
    count = extent(shape, strides)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, (count + 2 * FAR_STRIDE) * dtype.itemsize, flags=flags)
    except OSError as error:
        raise LayoutRefused(f"far: {error}; is there a limit of virtual memory (ulimit -v)?") from error
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MB for each row would fill the machine
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, FAR_STRIDE)


def _far(tensor: torch.Tensor, strides: tuple[int, ...]) -> Far:
    view = _far_apart(tensor.shape, strides, tensor.dtype).copy_(tensor)
    return Far(view, tensor.clone(), view)


def guard(tensor: torch.Tensor, arranged: Arrangement = "plain", place: int = 0) -> Guarded:
    """A copy of `tensor` between guards, with the same alignment, arranged as the argument at `place`."""
    if arranged == FAR_PAGES:
        return _far_pages(tensor)
    strides = strides_of(tensor, arranged, place)
    if arranged in FAR and strides != tensor.stride():
        return _far(tensor, strides)
    # A misaligned view stays misaligned: kernels specialise on 16 bytes.
    skew = tensor.data_ptr() % 16 // tensor.element_size()
    buffer, view = _allocate(tuple(tensor.shape), tuple(strides), tensor.dtype, tensor.device, NAN_BYTE, skew)
    if tensor.numel():
        single = _single(tuple(strides))
        view[single].copy_(tensor[single])
    return Guarded(buffer, buffer.clone(), view)


def in_one_storage(guards: Mapping[str, Guarded]) -> dict[str, Guarded]:
    """The tensors of each dtype as views of one storage, guards included, as parts of one product's output are."""
    placed_guards = dict(guards)
    for dtype in {guarded.buffer.dtype for guarded in guards.values()}:
        names = [name for name, guarded in guards.items() if guarded.buffer.dtype == dtype]
        whole = torch.cat([guards[name].buffer.view(torch.uint8) for name in names]).view(dtype)
        start = 0
        for name in names:
            view, count = guards[name].view, guards[name].buffer.numel()
            part, start = whole[start : start + count], start + count
            inside = view.storage_offset() - guards[name].buffer.storage_offset()
            placed = part.as_strided(view.shape, view.stride(), part.storage_offset() + inside)
            placed_guards[name] = Guarded(part, guards[name].pristine, placed)
    return placed_guards


def guard_output(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    arranged: Arrangement = "plain",
    stale: torch.Tensor | None = None,
) -> Guarded:
    """An output between guards, full of NaN, or of the sentinel for integers.

    With `stale` it holds these values of an earlier answer, like memory that a caller uses again.
    """
    model = torch.empty(shape, dtype=dtype, device="meta")
    strides = strides_of(model, arranged)
    byte = NAN_BYTE if dtype.is_floating_point else SENTINEL_BYTE
    if arranged in FAR and device.type != "cuda":
        raw = torch.full((model.numel() * dtype.itemsize,), byte, dtype=torch.uint8)
        return _far(raw.view(dtype).view(shape), strides)
    buffer, view = _allocate(shape, tuple(strides), dtype, device, byte, 0)
    if stale is not None:
        view.copy_(stale)
    return Guarded(buffer, buffer.clone(), view)


def _allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, byte: int, skew: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer, full of poison, and the view in its middle."""
    side = GUARD_BYTES // dtype.itemsize
    whole = 2 * side + skew + extent(shape, strides)
    count = -(-whole // 256) * 256  # so that what follows in one storage is aligned too
    raw = torch.full((count * dtype.itemsize,), byte, dtype=torch.uint8, device=device)
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


def strides_of(tensor: torch.Tensor, arranged: Arrangement, place: int = 0) -> tuple[int, ...]:
    """The strides of an arrangement; no longer stride follows from the sizes alone.  Those of the tensor itself where
    it is empty, expanded, or has one dimension and keeps its elements together."""
    strides = list(tensor.stride())
    if arranged == "plain" or tensor.numel() == 0 or 0 in strides or (tensor.ndim < 2 and arranged != "apart"):
        return tuple(strides)
    order = sorted(range(tensor.ndim), key=lambda dim: (strides[dim], -dim), reverse=arranged == "turned")
    if arranged in FAR:
        far_strides = (
            [] if tensor.device.type == "cuda" else _far_strides(tuple(tensor.shape), order, arranged == FAR[1], place)
        )
        return tuple(far_strides or strides)
    step = 2 if arranged == "apart" else 1
    for dim in order:
        strides[dim] = step
        step = step * tensor.shape[dim] + ROW_PADDING * (1 + place)
    return tuple(strides)


def _far_strides(shape: tuple[int, ...], order: list[int], inside: bool, place: int) -> list[int]:
    """Strides, the shortest first in `order`, of which one is near 2**31, or a part of `FAR_EXTENT` for many rows.

    It is that of the outermost dimension with a third row, or `inside` of another one.  Longer ones contain it, so that
    each dimension of the rest may be joined with the next.  Empty where no dimension fits.
    """
    outer = [dim for dim in order[1:] if shape[dim] > 1]
    outermost = next((dim for dim in reversed(outer) if shape[dim] > 2), outer[-1] if outer else None)
    others = [dim for dim in outer if dim != outermost]
    if outermost is None or (inside and not others) or math.prod(shape) // shape[order[0]] > FAR_ROWS:
        return []
    for far_dim in [*others[place % len(others) :], *others] if inside else [outermost]:
        strides, step = [1] * len(shape), -(-shape[order[0]] // FAR_ALIGN) * FAR_ALIGN
        for dim in order[1:]:
            if dim == far_dim:
                step = max(step, min(FAR_STRIDE - 1, FAR_EXTENT // (shape[dim] - 1)) // FAR_ALIGN * FAR_ALIGN)
            strides[dim] = step
            step *= shape[dim]
        if step <= FAR_MOST:
            return strides
    return []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes (n,): a NaN then equals itself, and -0.0 differs from 0.0."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a dimension of size 1 may have any stride


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one size hold the same bytes; eight at a time, for single ones take 4 times as long."""
    pair = bits(first), bits(second)
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


LATE_S = 0.1
"""Seconds for which an output is watched for late writes."""


def aliases(output: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether `output` shares memory with `buffer`, even as another object."""
    if not output.numel() or output.device != buffer.device:
        return False
    storage = buffer.untyped_storage()
    begin = output.data_ptr()
    end = begin + extent(output.shape, output.stride()) * output.element_size()
    return begin < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < end


def changes_later(outputs: Outputs, read: Outputs) -> str | None:
    """A fault if `outputs` change from the values `read` within `LATE_S`."""
    ends = time.monotonic() + LATE_S
    while all(same_bits(now, was) for now, was in zip(outputs, read, strict=True)):
        if time.monotonic() > ends:
            return None
        time.sleep(0.002)
    return "a thread that finishes later: the output changed after the call had returned"


def never_written(read: Outputs) -> bool:
    """Whether outputs hold only poison: NaN, the sentinel, or torch's value for uninitialised integers."""
    return bool(read) and all(output.numel() and _is_poison(output) for output in read)


def _is_poison(output: torch.Tensor) -> bool:
    if output.dtype.is_floating_point:
        return bool(output.isnan().all())
    if output.dtype in (torch.bool, torch.uint8):
        return False  # poison is an ordinary value there
    fresh = bool((output == torch.iinfo(output.dtype).max).all())
    return fresh or bool((bits(output) == SENTINEL_BYTE).all())


def kept_names(spec: OpSpec, inputs: Inputs) -> frozenset[str]:
    """Names of the weights: a kernel may keep what it computes from a weight while it is the same tensor."""
    beside = spec.prepared_with
    return frozenset(name for name in inputs if name in (spec.prepared, *beside, "weight"))


def alike(inputs: Inputs, others: Inputs) -> bool:
    """Whether both have the same shapes and scalars, so that the values of one fit into the memory of the other."""
    return all(
        isinstance(value, torch.Tensor) and value.shape == others[name].shape
        if isinstance(others[name], torch.Tensor)
        else value is others[name] or value == others[name]
        for name, value in inputs.items()
    )
