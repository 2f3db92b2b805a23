"""Kernels of small ops: some wrong in ways that any kernel can be, some in ways of their op, and some right."""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl

from .entries import Kind
from .tiny_ops import LENIENT, PROJECT, SCALE, STORE

right = Kind(__name__, "right: a small op", "OK")
zeros = Kind(__name__, "wrong numbers")
returned = Kind(__name__, "shape, dtype or number of results")
strides = Kind(__name__, "strides")
outside = Kind(__name__, "memory outside a tensor")
changes = Kind(__name__, "a changed argument")
wide = Kind(__name__, "offsets of 32 bits")
state = Kind(__name__, "kept state")


def exact(x, weight):
    return (x.double() @ weight.double()).to(x.dtype)


def empty(x, weight):
    return torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)


def as_contiguous(x):
    """What lies there if rows follow one another."""
    return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())


def then(harm):
    """A kernel that answers rightly and then does `harm`."""
    return lambda x, weight: (exact(x, weight), harm(x, weight))[0]


@right(PROJECT)
def plain(x, weight):
    return x @ weight


@right(PROJECT)
def into_out(x, weight, out=None):
    return (empty(x, weight) if out is None else out).copy_(exact(x, weight))


@right(PROJECT)
def refuses_padding(x, weight):
    for name, tensor in (("weight", weight), ("x", x)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    return exact(x, weight)


right(PROJECT, name="packed", prepare=lambda weight: (weight.mT.contiguous(),))(
    lambda x, weight: exact(x, weight[0].mT)
)


def in_any_order(x, weight):
    order = torch.randperm(x.shape[1])
    return x[:, order] @ weight[order]


changes(
    PROJECT,
    "prepare: weight was changed",
    name="prepare_changes_the_weight",
    prepare=lambda weight: weight.mul_(2).div(2),
)(exact)
right(PROJECT, name="declared_nondeterministic", nondeterministic="adds in whatever order the threads arrive")(
    in_any_order
)
zeros(PROJECT, "two runs on the same inputs differ", name="random_order")(in_any_order)
for kind, spec, name, words, fn in (
    (zeros, PROJECT, "zeros", "first data: y: 35 of 35", lambda x, weight: empty(x, weight).zero_()),
    (zeros, PROJECT, "writes_nothing", "first data: y: 35 of 35", empty),
    (zeros, PROJECT, "computes_in_bf16", "first data: y:",
     lambda x, weight: (x.bfloat16() @ weight.bfloat16()).to(x.dtype)),
    (zeros, LENIENT, "infinite", "35 elements not finite where the oracle is",
     lambda x, weight: empty(x, weight).fill_(torch.inf)),
    (returned, PROJECT, "ignores_out", "expected the tensor given as out",
     lambda x, weight, out=None: exact(x, weight)),
    (returned, PROJECT, "wrong_shape", "expected shape (5, 7), got (7, 5)", lambda x, weight: exact(x, weight).mT),
    (returned, PROJECT, "wrong_dtype", "expected dtype torch.float32, got torch.float64",
     lambda x, weight: x.double() @ weight.double()),
    (returned, PROJECT, "wrong_device", "expected device cpu, got meta", lambda x, weight: exact(x, weight).to("meta")),
    (returned, PROJECT, "returns_nothing", "returned NoneType", lambda x, weight: None),
    (returned, PROJECT, "returns_too_much", "returned 2 values", lambda x, weight: (exact(x, weight), x)),
    (strides, PROJECT, "assumes_contiguous_inputs", "other data, padded",
     lambda x, weight: exact(as_contiguous(x), weight)),
    (strides, PROJECT, "reads_as_if_contiguous",  # between the elements, where NaN lies
     "it takes strides of weight or x for granted: with the usual ones it is right",
     lambda x, weight: as_contiguous(x) @ weight),
    (changes, PROJECT, "scales_its_input", "x: was changed", then(lambda x, weight: x.mul_(1.0000001))),
    (outside, PROJECT, "clears_after_its_input", "x: memory outside it was written",
     then(lambda x, weight: x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_())),
):  # fmt: skip
    kind(spec, words, name=name)(fn)


@zeros(PROJECT, "planted last k")
def drops_a_small_last_k(x, weight):
    last = x[:, -1:].double() @ weight[-1:].double()
    return (x.double() @ weight.double() - torch.where(x[:, -1:].abs() > 16, last, 0)).to(x.dtype)


@strides(PROJECT, "into out")
def ignores_the_strides_of_out(x, weight, out=None):
    y = exact(x, weight)
    return y if out is None else (out.as_strided(y.shape, y.stride(), out.storage_offset()).copy_(y), out)[1]


@strides(PROJECT, "other data, padded x:")
def checks_one_argument_only(x, weight):
    if not weight.is_contiguous():
        raise ValueError("weight: expected a contiguous tensor, got another")
    return exact(as_contiguous(x), weight)


@outside(PROJECT, "first data: y: 35 of 35")
def reads_past_its_input(x, weight):
    longer = x.as_strided((x.shape[0], x.shape[1] + 1), x.stride(), x.storage_offset())
    return longer[:, 1:] @ weight + 0 * longer.as_strided((1,), (1,), x.storage_offset() + x.numel())


@outside(PROJECT, "out (y): memory outside it was written")
def writes_one_row_more(x, weight, out=None):
    y = exact(x, weight)
    if out is None:
        return y
    longer = out.as_strided((out.shape[0] + 1, out.shape[1]), out.stride(), out.storage_offset())
    longer.copy_(torch.cat([y, y[:1]]))
    return out


@wide(PROJECT, "32-bit offsets: far weight, x: y: 21 of 35 elements off")
def offsets_in_32_bits(x, weight):
    """Rows from 2**31 elements on lie before the tensor; here they are read as its first row."""
    return torch.stack([row if i * x.stride(0) < 2**31 else x[0] for i, row in enumerate(x)]) @ weight


@state.made(PROJECT, "an earlier call's output has changed since")
def shared_buffer():
    """Returns the same memory every time."""
    buffers = []

    def one_buffer(x, weight):
        buffers.append(exact(x, weight))
        return buffers[0].copy_(buffers[-1])

    return one_buffer


@state.made(PROJECT, "a call from another thread: it is right only in the thread of its first call")
def state_of_one_thread():
    own = threading.local()
    own.scale = 1.0
    return lambda x, weight: x @ weight * getattr(own, "scale", 0.0)


@state(PROJECT, "other data, padded weight, x")
def operands_by_their_storage(x, weight):
    """The copy that it makes of an operand is known by the operand's storage, which may hold both."""
    copies = {}
    one, other = (copies.setdefault(t.untyped_storage().data_ptr(), t.contiguous()) for t in (x, weight))
    return (one if one is not other else x[:, :1].expand_as(x)) @ other.view(weight.shape[0], -1)[:, : weight.shape[1]]


# A cache that is written in place.


def write(k, v, k_cache, v_cache, slot_mapping, least=0):
    for new, cache in ((k, k_cache), (v, v_cache)):
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= least:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]


@right(STORE)
def stores(k, v, k_cache, v_cache, slot_mapping):
    write(k, v, k_cache, v_cache, slot_mapping)


for kind, name, words, fn in (
    (zeros, "stores_skipped_tokens_last", "first data: k_cache:",
     lambda k, v, k_cache, v_cache, slot_mapping: write(k, v, k_cache, v_cache, slot_mapping, least=-1)),
    (zeros, "forgets_v", "v_cache: ",
     lambda k, v, k_cache, v_cache, slot_mapping: stores(k, k, k_cache, k_cache, slot_mapping)),
    (changes, "consumes_its_slots", "slot_mapping: was changed",
     lambda k, v, k_cache, v_cache, slot_mapping: (
         stores(k, v, k_cache, v_cache, slot_mapping), slot_mapping.fill_(-1))[0]),
    (returned, "returns_the_caches", "expected None",
     lambda k, v, k_cache, v_cache, slot_mapping: (
         stores(k, v, k_cache, v_cache, slot_mapping), (k_cache, v_cache))[1]),
):  # fmt: skip
    kind(STORE, words, name=name)(fn)


@outside(STORE, "k_cache: memory outside it was written")
def stores_skipped_tokens_before_the_cache(k, v, k_cache, v_cache, slot_mapping):
    stores(k, v, k_cache, v_cache, slot_mapping)
    for cache in (k_cache, v_cache) if (slot_mapping < 0).any() else ():
        row = cache.stride(1)
        cache.as_strided((row,), (1,), cache.storage_offset() - row)[: cache[0, 0].numel()] = 0


@triton.jit
def store_rows(new, cache, slots, row, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64 if WIDE else tl.int32)
    at = tl.arange(0, BLOCK)
    values = tl.load(new + tl.program_id(0) * row + at, mask=at < row)
    tl.store(cache + slot * row + at, values, mask=(at < row) & (slot >= 0))


def stores_in_triton(k, v, k_cache, v_cache, slot_mapping, wide):
    row = k_cache[0, 0].numel()
    for new, cache in ((k, k_cache), (v, v_cache)) if len(k) else ():
        block = triton.next_power_of_2(row)
        store_rows[(len(k),)](new.contiguous(), cache, slot_mapping, row, BLOCK=block, WIDE=wide)


@right(STORE, backend="triton")
def slots_in_64_bits(k, v, k_cache, v_cache, slot_mapping):
    stores_in_triton(k, v, k_cache, v_cache, slot_mapping, True)


@wide(STORE, "reaches rows of k_cache and v_cache by offsets of 32 bits", backend="triton")
def slots_in_32_bits(k, v, k_cache, v_cache, slot_mapping):
    stores_in_triton(k, v, k_cache, v_cache, slot_mapping, False)


# An op whose result may lie over its input.


@triton.jit
def scale_rows(x_ptr, y_ptr, rows, x_stride, y_stride, factor, MASKED: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = (columns < 8) | (not MASKED)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    tl.store(y_ptr + row * y_stride + columns, x * factor, mask=mask)


def scales_in_triton(x, factor, out, masked):
    if x.stride(1) != 1:
        raise ValueError(f"x: expected stride 1 along its rows, got {x.stride()}")
    out = torch.empty_like(x) if out is None else out
    scale_rows[(len(x),)](x, out, len(x), x.stride(0), out.stride(0), factor, MASKED=masked, WIDTH=16)
    return out


@right(SCALE, backend="triton")
def in_triton(x, factor=1.0, out=None):
    return scales_in_triton(x, factor, out, True)


@outside(
    SCALE, "first data again, into out, in another thread: out (y): memory outside it was written", backend="triton"
)
def forgets_its_mask_into_out(x, factor=1.0, out=None):
    return scales_in_triton(x, factor, out, out is None)


@changes(SCALE, "other data, out is x: y: 12 of 24")
def stores_a_half_too_early(x, factor=1.0, out=None):
    out = torch.empty_like(x) if out is None else out
    out[:, :4] = x[:, 4:] * factor
    out[:, 4:] = x[:, :4] * factor
    return out.copy_(out.roll(4, 1))


@right(SCALE)
def refuses_to_lie_over_its_input(x, factor=1.0, out=None):
    if out is not None and out.data_ptr() == x.data_ptr():
        raise ValueError("out: expected other memory than that of x")
    return torch.mul(x, factor, out=out)
