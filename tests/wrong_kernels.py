"""Kernels that are wrong on purpose, in ways that any kernel can be and in ways of their op, and right ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from tiny_ops import LENIENT, OFFSETS, PROJECT, SCALE, STORE, right, wrong

from rooflab.kernels.flash_attention import naive

Tensor = torch.Tensor


def _exact(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double()).to(x.dtype)


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)


def _as_contiguous(x: Tensor) -> Tensor:
    """What lies there if rows follow one another."""
    return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())


@right(PROJECT)
def plain(x, weight):
    return x @ weight


@right(PROJECT)
def into_out(x, weight, out=None):
    return (_empty(x, weight) if out is None else out).copy_(_exact(x, weight))


@right(PROJECT)
def refuses_padding(x, weight):
    for name, tensor in (("weight", weight), ("x", x)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    return _exact(x, weight)


@right(PROJECT, prepare=lambda weight: (weight.mT.contiguous(),))
def packed(x, weight):
    return _exact(x, weight[0].mT)


@right(PROJECT, nondeterministic="adds in whatever order the threads arrive")
def declared_nondeterministic(x, weight):
    order = torch.randperm(x.shape[1])
    return x[:, order] @ weight[order]


@wrong(PROJECT, "planted last k")
def drops_a_small_last_k(x, weight):
    last = x[:, -1:].double() @ weight[-1:].double()
    return (x.double() @ weight.double() - torch.where(x[:, -1:].abs() > 16, last, 0)).to(x.dtype)


@wrong(PROJECT, "into out")
def ignores_the_strides_of_out(x, weight, out=None):
    y = _exact(x, weight)
    return y if out is None else (out.as_strided(y.shape, y.stride(), out.storage_offset()).copy_(y), out)[1]


@wrong(PROJECT, "x: was changed")
def scales_its_input(x, weight):
    y = _exact(x, weight)
    x.mul_(1.0000001)
    return y


def one_buffer() -> Callable[..., Tensor]:
    """A kernel that returns the same memory every time."""
    buffers: list[Tensor] = []

    def shared_buffer(x, weight):
        buffers.append(_exact(x, weight))
        return buffers[0].copy_(buffers[-1])

    return shared_buffer


@wrong(PROJECT, "x: memory outside it was written")
def clears_after_its_input(x, weight):
    y = _exact(x, weight)
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
    return y


@wrong(PROJECT, "first data: y: 35 of 35")
def reads_past_its_input(x, weight):
    longer = x.as_strided((x.shape[0], x.shape[1] + 1), x.stride(), x.storage_offset())
    return longer[:, 1:] @ weight + 0 * longer.as_strided((1,), (1,), x.storage_offset() + x.numel())


@wrong(PROJECT, "out (y): memory outside it was written")
def writes_one_row_more(x, weight, out=None):
    y = _exact(x, weight)
    if out is None:
        return y
    longer = out.as_strided((out.shape[0] + 1, out.shape[1]), out.stride(), out.storage_offset())
    longer.copy_(torch.cat([y, y[:1]]))
    return out


@wrong(PROJECT, "two runs on the same inputs differ")
def random_order(x, weight):
    order = torch.randperm(x.shape[1])
    return x[:, order] @ weight[order]


@wrong(PROJECT, "other data, padded x:")
def checks_one_argument_only(x, weight):
    if not weight.is_contiguous():
        raise ValueError("weight: expected a contiguous tensor, got another")
    return _exact(_as_contiguous(x), weight)


TABLE = [
    (PROJECT, "zeros", "first data: y: 35 of 35", lambda x, weight: _empty(x, weight).zero_()),
    (PROJECT, "writes_nothing", "first data: y: 35 of 35", lambda x, weight: _empty(x, weight)),
    (PROJECT, "ignores_out", "expected the tensor given as out", lambda x, weight, out=None: _exact(x, weight)),
    (PROJECT, "computes_in_bf16", "first data: y:", lambda x, weight: (x.bfloat16() @ weight.bfloat16()).to(x.dtype)),
    (PROJECT, "wrong_shape", "expected shape (5, 7), got (7, 5)", lambda x, weight: _exact(x, weight).mT),
    (
        PROJECT,
        "wrong_dtype",
        "expected dtype torch.float32, got torch.float64",
        lambda x, weight: x.double() @ weight.double(),
    ),
    (PROJECT, "wrong_device", "expected device cpu, got meta", lambda x, weight: _exact(x, weight).to("meta")),
    (PROJECT, "returns_nothing", "returned NoneType", lambda x, weight: None),
    (PROJECT, "returns_too_much", "returned 2 values", lambda x, weight: (_exact(x, weight), x)),
    (PROJECT, "assumes_contiguous_inputs", "other data, padded", lambda x, weight: _exact(_as_contiguous(x), weight)),
    (
        LENIENT,
        "infinite",
        "35 elements not finite where the oracle is",
        lambda x, weight: _empty(x, weight).fill_(torch.inf),
    ),
    (OFFSETS, "in_int32", "first data: offset:", lambda blocks, row_bytes: (blocks.int() * row_bytes).long()),
    (
        OFFSETS,
        "returns_int32",
        "expected dtype torch.int64, got torch.int32",
        lambda blocks, row_bytes: (blocks * row_bytes).int(),
    ),
]
for _spec, _name, _words, _fn in TABLE:
    _fn.__name__ = _name
    wrong(_spec, _words)(_fn)


@wrong(PROJECT, "prepare: weight was changed", prepare=lambda weight: weight.mul_(2).div(2))
def prepare_changes_the_weight(x, weight):
    return _exact(x, weight)


@right(OFFSETS)
def in_int64(blocks, row_bytes):
    return blocks * row_bytes


def drops_the_last_key(q, k, v, causal=False, softmax_scale=None):
    """Among 16384 keys that weigh the same this is within any honest tolerance; the planted key shows it."""
    return naive.naive(q, k[:, :-1], v[:, :-1], causal, softmax_scale)


@right(STORE)
def stores(k, v, k_cache, v_cache, slot_mapping):
    for new, cache in ((k, k_cache), (v, v_cache)):
        for token in range(k.shape[0]):
            slot = int(slot_mapping[token])
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


@wrong(STORE, "first data: k_cache:")
def stores_skipped_tokens_last(k, v, k_cache, v_cache, slot_mapping):
    for new, cache in ((k, k_cache), (v, v_cache)):
        for token, slot in enumerate(slot_mapping.tolist()):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


@wrong(STORE, "k_cache: memory outside it was written")
def stores_skipped_tokens_before_the_cache(k, v, k_cache, v_cache, slot_mapping):
    for new, cache in ((k, k_cache), (v, v_cache)):
        row = cache.stride(1)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]
            else:
                cache.as_strided((row,), (1,), cache.storage_offset() - row)[: new[token].numel()] = 0


@wrong(STORE, "slot_mapping: was changed")
def consumes_its_slots(k, v, k_cache, v_cache, slot_mapping):
    stores(k, v, k_cache, v_cache, slot_mapping)
    slot_mapping.fill_(-1)


@wrong(STORE, "v_cache: ")
def forgets_v(k, v, k_cache, v_cache, slot_mapping):
    stores(k, k, k_cache, k_cache, slot_mapping)


@wrong(STORE, "expected None")
def returns_the_caches(k, v, k_cache, v_cache, slot_mapping):
    stores(k, v, k_cache, v_cache, slot_mapping)
    return k_cache, v_cache


@triton.jit
def _scale_kernel(x_ptr, y_ptr, rows, x_stride, y_stride, factor, MASKED: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = (columns < 8) | (not MASKED)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    tl.store(y_ptr + row * y_stride + columns, x * factor, mask=mask)


def _launch(x, factor, out, masked):
    if x.stride(1) != 1:
        raise ValueError(f"x: expected stride 1 along its rows, got {x.stride()}")
    out = torch.empty_like(x) if out is None else out
    _scale_kernel[(len(x),)](x, out, len(x), x.stride(0), out.stride(0), factor, MASKED=masked, WIDTH=16)
    return out


@right(SCALE, backend="triton")
def in_triton(x, factor=1.0, out=None):
    return _launch(x, factor, out, True)


@wrong(SCALE, "first data again, into out, in another thread: out (y): memory outside it was written", backend="triton")
def forgets_its_mask_into_out(x, factor=1.0, out=None):
    return _launch(x, factor, out, out is None)


@wrong(SCALE, "other data, out is x: y: 12 of 24")
def stores_a_half_too_early(x, factor=1.0, out=None):
    out = torch.empty_like(x) if out is None else out
    out[:, :4] = x[:, 4:] * factor
    out[:, 4:] = x[:, :4] * factor
    return out.copy_(out.roll(4, 1))


def refuses_factors(x, factor=1.0):
    if factor != 1.0:
        raise ValueError(f"factor is 1 here, got {factor}")
    return x.clone()


@right(SCALE)
def refuses_to_lie_over_its_input(x, factor=1.0, out=None):
    if out is not None and out.data_ptr() == x.data_ptr():
        raise ValueError("out: expected other memory than that of x")
    return torch.mul(x, factor, out=out)


@wrong(PROJECT, "32-bit offsets: far weight, x: y: 21 of 35 elements off")
def offsets_in_32_bits(x, weight):
    """Rows from 2**31 elements on lie before the tensor; here they are read as its first row."""
    return torch.stack([row if i * x.stride(0) < 2**31 else x[0] for i, row in enumerate(x)]) @ weight


_own, _by_storage = threading.local(), dict[int, Tensor]()
_own.scale = 1.0


@wrong(PROJECT, "a call from another thread: it is right only in the thread of its first call")
def state_of_one_thread(x, weight):
    return x @ weight * getattr(_own, "scale", 0.0)


@wrong(PROJECT, "other data, padded weight, x")
def operands_by_their_storage(x, weight):
    """The copy that it makes of an operand is known by the operand's storage, which may hold both."""
    _by_storage.clear()
    one, other = (_by_storage.setdefault(t.untyped_storage().data_ptr(), t.contiguous()) for t in (x, weight))
    return (one if one is not other else x[:, :1].expand_as(x)) @ other.view(weight.shape[0], -1)[:, : weight.shape[1]]


@triton.jit
def _store_rows(new, cache, slots, row, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64 if WIDE else tl.int32)
    at = tl.arange(0, BLOCK)
    values = tl.load(new + tl.program_id(0) * row + at, mask=at < row)
    tl.store(cache + slot * row + at, values, mask=(at < row) & (slot >= 0))


def _stores(k, v, k_cache, v_cache, slot_mapping, wide):
    row = k_cache[0, 0].numel()
    for new, cache in ((k, k_cache), (v, v_cache)) if len(k) else ():
        block = triton.next_power_of_2(row)
        _store_rows[(len(k),)](new.contiguous(), cache, slot_mapping, row, BLOCK=block, WIDE=wide)


@right(STORE, backend="triton")
def slots_in_64_bits(k, v, k_cache, v_cache, slot_mapping):
    _stores(k, v, k_cache, v_cache, slot_mapping, True)


@wrong(STORE, "reaches rows of k_cache and v_cache by offsets of 32 bits", backend="triton")
def slots_in_32_bits(k, v, k_cache, v_cache, slot_mapping):
    _stores(k, v, k_cache, v_cache, slot_mapping, False)
