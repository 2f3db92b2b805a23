"""Detects wrong reads and writes: guards around tensors, poison (NaN) in unwritten memory, comparison of all bits.

It also detects kernels that keep answers between calls, finish after the call, or return memory that they did not
write.  Generated kernels often do so (Ouyang et al., KernelBench, 2025; reports in the public kernel contests of 2025
and 2026).
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
"""Bytes of the guard on each side of a tensor: more than a page of a small model's KV cache, so slot -1 hits it."""
ROW_PADDING = 16
"""Elements added to each stride of a padded layout.  This number is multiplied by the argument's position, so that no
two arguments have the same strides.  It is a multiple of 16 bytes in every dtype, so alignment is kept."""
Arrangement = Literal["plain", "padded", "apart", "turned", "far", "far inside", "far pages"]
"""The memory layout of a tensor, in this order: as given; longer strides; a gap after every element, so that no stride
is 1; dimensions in the reverse order; most rows more than 2**31 elements behind the first, beyond 32-bit offsets; the
same for another dimension, such as heads; a contiguous cache whose pages after the first lie more than 2**31 elements
behind it."""
FAR_LAYOUTS: tuple[Arrangement, ...] = ("far", "far inside")
FAR_PAGES: Arrangement = "far pages"
FAR_STRIDE, FAR_EXTENT, MAX_SPAN, MAX_FAR_ROWS, FAR_ALIGN = 2**31, 2**33, 2**37, 4096, 64
"""Limits of a far tensor, in elements: its far stride is below the first, because Triton passes a stride of 2**31 in 64
bits; the extent of the far dimension; the largest distance from first to last element; the most rows, because each row
takes a page of memory; strides are multiples of the last."""
MAP_NORESERVE = 0x4000
"""mmap's flag to reserve more memory than the machine has (Linux)."""
NAN_BYTE = 0xFF
"""A byte of ones: NaN in every float dtype, -1 in an integer.  An index read from a guard is -1, which hits a guard."""
SENTINEL_BYTE = 0x7B
"""The fill byte of an integer output.  The value is large in every width, so it is no token, slot or length."""


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger buffer.  All other bytes of the buffer are poison, such as NaN."""

    buffer: torch.Tensor
    """Shape (n,): a guard, the tensor's storage with poison in the gaps, and another guard."""
    pristine: torch.Tensor
    """A copy of the buffer before the kernel ran."""
    view: torch.Tensor
    """The tensor, as a view of the buffer."""

    @property
    def own(self) -> torch.Tensor:
        """Returns the tensor without the memory that the check added around or inside it."""
        return self.view

    def rewrite(self, tensor: torch.Tensor) -> None:
        """Writes other values of the same shape to the same addresses.

        torch's version counter does not change, as if a Triton or CUDA kernel had written the values."""
        single_index = _single(self.view.stride())
        for view in (self.view.data, self._place_in(self.pristine)):
            view[single_index].copy_(tensor[single_index])

    def _place_in(self, copy: torch.Tensor) -> torch.Tensor:
        """Returns the view of the tensor's elements in `copy`, which is a copy of the tensor's whole buffer."""
        view_offset = self.view.storage_offset() - self.buffer.storage_offset()
        return copy.as_strided(self.view.shape, self.view.stride(), view_offset)

    def damage(self, *, may_change: bool) -> str | None:
        """Describes a forbidden write, or returns None.  With `may_change` the tensor's elements may change."""
        first_element = self.view.storage_offset() - self.buffer.storage_offset()
        end_element = first_element + self.view.numel()
        if not may_change and same_bits(self.buffer, self.pristine):
            return None
        if may_change and self.view.is_contiguous():  # no gaps: only the guards can be wrong
            guard_pairs = ((tensor[:first_element], tensor[end_element:]) for tensor in (self.buffer, self.pristine))
            if all(same_bits(*guard_pair) for guard_pair in zip(*guard_pairs, strict=True)):
                return None
        expected_buffer = self.pristine.clone()
        view = self._place_in(expected_buffer)
        if may_change:
            view.copy_(self.view)
        actual_bits, expected_bits = bits(self.buffer), bits(expected_buffer)
        if same_bits(self.buffer, expected_buffer):
            return None
        if not same_bits(self.view, view):
            return "was changed"
        first_byte = int((actual_bits != expected_bits).nonzero()[0])
        element_index = first_byte // self.buffer.element_size() - first_element
        return f"memory outside it was written, first at element {element_index} from its start"


@dataclass(frozen=True)
class Far(Guarded):
    """A tensor with rows that lie far apart.  The memory between the rows is not touched.  There are no guards."""

    def damage(self, *, may_change: bool) -> str | None:
        return None if may_change or same_bits(self.own, self.pristine) else "was changed"


@dataclass(frozen=True)
class FarPages(Far):
    """A contiguous cache of pages.  More than 2**31 elements of unused pages follow the first page."""

    @property
    def own(self) -> torch.Tensor:
        return torch.cat((self.view[:1], self.view[1 + _gap(self.pristine) :]))


def _gap(cache: torch.Tensor) -> int:
    """Returns how many unused pages after the first page put the others of `cache` over 2**31 elements behind it."""
    return FAR_STRIDE // cache[0].numel() + 1


def far_slots(slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Converts token positions (slots) in a paged KV cache.  The new positions belong to a copy with many unused pages
    after the first page.  So the copy needs 64-bit offsets.  `cache`, `[pages, page size, ...]`, is the original."""
    return slots + (slots >= cache.shape[1]) * (_gap(cache) * cache.shape[1])


def _far_pages(cache: torch.Tensor) -> FarPages:
    far_shape = (len(cache) + _gap(cache), *cache.shape[1:])
    view = _far_apart(torch.Size(far_shape), torch.empty(far_shape, device="meta").stride(), cache.dtype)
    view[:1], view[1 + _gap(cache) :] = cache[:1], cache[1:]
    return FarPages(view, cache.clone(), view)


def _far_apart(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a CPU tensor of zeros with the given strides, and 2**31 unused elements before and after it. Untouched
    pages take no memory. Raises `LayoutRefused` without enough address space."""
    element_count = extent(shape, strides)
    mmap_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        mapped_memory = mmap.mmap(-1, (element_count + 2 * FAR_STRIDE) * dtype.itemsize, flags=mmap_flags)
    except OSError as error:
        raise LayoutRefused(f"far: {error}; is there a limit of virtual memory (ulimit -v)?") from error
    mapped_memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MB for each row would fill the machine
    return torch.frombuffer(mapped_memory, dtype=dtype).as_strided(shape, strides, FAR_STRIDE)


def _far(tensor: torch.Tensor, strides: tuple[int, ...]) -> Far:
    view = _far_apart(tensor.shape, strides, tensor.dtype).copy_(tensor)
    return Far(view, tensor.clone(), view)


def guard(tensor: torch.Tensor, arranged: Arrangement = "plain", place: int = 0) -> Guarded:
    """Copies a tensor into a larger buffer, whose other elements are NaN, to detect wrong reads and writes.  `arranged`
    is the memory layout of the copy.  Layouts with distant rows have no NaN around them.  `place` is the position of
    the argument; it gives each argument different padding."""
    if arranged == FAR_PAGES:
        return _far_pages(tensor)
    strides = strides_of(tensor, arranged, place)
    if arranged in FAR_LAYOUTS and strides != tensor.stride():
        return _far(tensor, strides)
    # A misaligned view stays misaligned: kernels specialise on 16 bytes.
    skew_elements = tensor.data_ptr() % 16 // tensor.element_size()
    buffer, view = _allocate(tuple(tensor.shape), tuple(strides), tensor.dtype, tensor.device, NAN_BYTE, skew_elements)
    if tensor.numel():
        single_index = _single(tuple(strides))
        view[single_index].copy_(tensor[single_index])
    return Guarded(buffer, buffer.clone(), view)


def in_one_storage(guards: Mapping[str, Guarded]) -> dict[str, Guarded]:
    """Puts all tensors of one dtype, with their guards, into one storage, as if one op had computed all of them."""
    placed_guards = dict(guards)
    for dtype in {guarded_tensor.buffer.dtype for guarded_tensor in guards.values()}:
        tensor_names = [name for name, guarded_tensor in guards.items() if guarded_tensor.buffer.dtype == dtype]
        joined_storage = torch.cat([guards[name].buffer.view(torch.uint8) for name in tensor_names]).view(dtype)
        buffer_start = 0
        for name in tensor_names:
            view, num_items = guards[name].view, guards[name].buffer.numel()
            buffer, buffer_start = joined_storage[buffer_start : buffer_start + num_items], buffer_start + num_items
            view_offset = view.storage_offset() - guards[name].buffer.storage_offset()
            placed_view = buffer.as_strided(view.shape, view.stride(), buffer.storage_offset() + view_offset)
            placed_guards[name] = Guarded(buffer, guards[name].pristine, placed_view)
    return placed_guards


def guard_output(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    arranged: Arrangement = "plain",
    stale: torch.Tensor | None = None,
) -> Guarded:
    """Returns an output tensor between guard zones, filled with NaN; an integer output is filled with `SENTINEL_BYTE`.

    If `stale` is given, the output holds these values of an earlier answer, like memory that a caller uses again."""
    meta_output = torch.empty(shape, dtype=dtype, device="meta")
    strides = strides_of(meta_output, arranged)
    fill_byte = NAN_BYTE if dtype.is_floating_point else SENTINEL_BYTE
    if arranged in FAR_LAYOUTS and device.type != "cuda":
        raw_bytes = torch.full((meta_output.numel() * dtype.itemsize,), fill_byte, dtype=torch.uint8)
        return _far(raw_bytes.view(dtype).view(shape), strides)
    buffer, view = _allocate(shape, tuple(strides), dtype, device, fill_byte, 0)
    if stale is not None:
        view.copy_(stale)
    return Guarded(buffer, buffer.clone(), view)


def _allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, byte: int, skew: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates a buffer filled with `byte`. Returns the buffer, and a view of shape `shape` in its middle."""
    guard_elements = GUARD_BYTES // dtype.itemsize
    all_elements = 2 * guard_elements + skew + extent(shape, strides)
    aligned_elements = -(-all_elements // 256) * 256  # so that what follows in one storage is aligned too
    raw_bytes = torch.full((aligned_elements * dtype.itemsize,), byte, dtype=torch.uint8, device=device)
    buffer = raw_bytes.view(dtype)
    return buffer, buffer.as_strided(shape, strides, guard_elements + skew)


def _single(strides: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Returns an index that selects each stored element once: 0 in dimensions of stride 0, a full slice in others."""
    return tuple(0 if stride == 0 else slice(None) for stride in strides)


def wipe(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites old outputs with poison.  A kernel that returns an old output again then fails."""
    with torch.inference_mode():
        for tensor in tensors:
            if tensor.numel() and torch._debug_has_internal_overlap(tensor) != 1:
                tensor.fill_(torch.nan if tensor.dtype.is_floating_point else SENTINEL_BYTE)


def strides_of(tensor: torch.Tensor, arranged: Arrangement, place: int = 0) -> tuple[int, ...]:
    """Returns the strides of a tensor in the layout `arranged`, with padding between rows.  Empty and expanded tensors
    keep their strides.  One-dimensional tensors change only in the layout "apart" (a gap after each element)."""
    strides = list(tensor.stride())
    if arranged == "plain" or tensor.numel() == 0 or 0 in strides or (tensor.ndim < 2 and arranged != "apart"):
        return tuple(strides)
    dim_order = sorted(range(tensor.ndim), key=lambda dim: (strides[dim], -dim), reverse=arranged == "turned")
    if arranged in FAR_LAYOUTS:
        far_strides = (
            []
            if tensor.device.type == "cuda"
            else _far_strides(tuple(tensor.shape), dim_order, arranged == FAR_LAYOUTS[1], place)
        )
        return tuple(far_strides or strides)
    next_stride = 2 if arranged == "apart" else 1
    for dim in dim_order:
        strides[dim] = next_stride
        next_stride = next_stride * tensor.shape[dim] + ROW_PADDING * (1 + place)
    return tuple(strides)


def _far_strides(shape: tuple[int, ...], order: list[int], inside: bool, place: int) -> list[int]:
    """Returns strides, in elements, that put the rows of a tensor very far apart.  The distance is up to 2**31
    elements, which tests 64-bit offsets.  Returns [] if `shape` does not allow this.

    `order` lists the dimensions, smallest stride first.  Normally the outermost dimension with at least three rows gets
    the huge stride.  With `inside`, another dimension gets it; the search begins at number `place` of the others."""
    outer_dims = [dim for dim in order[1:] if shape[dim] > 1]
    outer_dim = next((dim for dim in reversed(outer_dims) if shape[dim] > 2), outer_dims[-1] if outer_dims else None)
    other_dims = [dim for dim in outer_dims if dim != outer_dim]
    if outer_dim is None or (inside and not other_dims) or math.prod(shape) // shape[order[0]] > MAX_FAR_ROWS:
        return []
    for far_dim in [*other_dims[place % len(other_dims) :], *other_dims] if inside else [outer_dim]:
        strides, dim_step = [1] * len(shape), -(-shape[order[0]] // FAR_ALIGN) * FAR_ALIGN
        for dim in order[1:]:
            if dim == far_dim:
                dim_step = max(dim_step, min(FAR_STRIDE - 1, FAR_EXTENT // (shape[dim] - 1)) // FAR_ALIGN * FAR_ALIGN)
            strides[dim] = dim_step
            dim_step *= shape[dim]
        if dim_step <= MAX_SPAN:
            return strides
    return []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as bytes, with shape `[n]`.  As bytes a NaN equals itself, and -0.0 differs from 0.0."""
    dense_copy = tensor.detach().contiguous()
    return dense_copy.as_strided((dense_copy.numel(),), (1,)).view(
        torch.uint8
    )  # a dimension of size 1 may have any stride


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one size hold the same bytes.  Compares 8 bytes at once; single bytes take 4x as long."""
    byte_pair = bits(first), bits(second)
    if all(tensor.numel() % 8 == tensor.storage_offset() % 8 == 0 for tensor in byte_pair):
        byte_pair = byte_pair[0].view(torch.int64), byte_pair[1].view(torch.int64)
    return torch.equal(*byte_pair)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Makes `torch.empty` return NaN, or the largest integer, inside a `with` block.

    PyTorch's deterministic mode fills uninitialised memory with these values.  The mode also changes the algorithms of
    a few ops, so do not compare the bits of two runs inside this block."""
    old_debug_mode = torch.get_deterministic_debug_mode()
    torch_settings: Any = torch.utils.deterministic
    old_setting = torch_settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
        torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` imports Inductor, which takes 2 s
        torch_settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(old_debug_mode)
            torch_settings.fill_uninitialized_memory = old_setting


LATE_S = 0.1
"""An output is watched for late writes for this many seconds."""


def aliases(output: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Returns whether `output` shares memory with `buffer`, even if they are different tensor objects."""
    if not output.numel() or output.device != buffer.device:
        return False
    storage = buffer.untyped_storage()
    first_address = output.data_ptr()
    end_address = first_address + extent(output.shape, output.stride()) * output.element_size()
    return first_address < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < end_address


def changes_later(outputs: Outputs, read: Outputs) -> str | None:
    """Watches the outputs of a finished kernel call for `LATE_S` seconds.  `read` holds the values right after the
    call.  Returns a description of the fault if an output changes, or else None."""
    deadline = time.monotonic() + LATE_S
    while all(same_bits(output, expected_output) for output, expected_output in zip(outputs, read, strict=True)):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
    return "a thread that finishes later: the output changed after the call had returned"


def never_written(read: Outputs) -> bool:
    """Whether outputs hold only poison: NaN, `SENTINEL_BYTE`, or torch's value for uninitialised integers."""
    return bool(read) and all(output.numel() and _is_poison(output) for output in read)


def _is_poison(output: torch.Tensor) -> bool:
    if output.dtype.is_floating_point:
        return bool(output.isnan().all())
    if output.dtype in (torch.bool, torch.uint8):
        return False  # poison is an ordinary value there
    all_max_int = bool((output == torch.iinfo(output.dtype).max).all())
    return all_max_int or bool((bits(output) == SENTINEL_BYTE).all())


def kept_names(spec: OpSpec, inputs: Inputs) -> frozenset[str]:
    """Returns the names of weight inputs.  A kernel may compute something from a weight and reuse it in later calls."""
    companion_names = spec.prepared_with
    return frozenset(name for name in inputs if name in (spec.prepared, *companion_names, "weight"))


def alike(inputs: Inputs, others: Inputs) -> bool:
    """Whether both sets of inputs have equal shapes and scalars, so that `inputs` fit in the memory of `others`."""
    return all(
        isinstance(value, torch.Tensor) and value.shape == others[name].shape
        if isinstance(others[name], torch.Tensor)
        else value is others[name] or value == others[name]
        for name, value in inputs.items()
    )
