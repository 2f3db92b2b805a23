"""Right kernels that work in place, in their own memory, in memory of other libraries, or in several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .entries import Kind
from .parts import added, gelu_and_mul, silu_and_mul

scratch = Kind(__name__, "right: scratch memory", "OK", devices=("cpu",))
foreign = Kind(__name__, "right: other libraries", "OK", devices=("cpu",))
threads = Kind(__name__, "right: threads", "OK", devices=("cpu",))


@scratch.made("silu_and_mul", name="scratch_of_a_thread")
def with_scratch_of_threads():
    """`out=` into memory that each thread keeps between its calls; the result is a copy."""
    kept = threading.local()

    def scratch_of_a_thread(x):
        gate, up = x.float().chunk(2, -1)
        if not hasattr(kept, "room") or kept.room.numel() < gate.numel():
            with torch.inference_mode(False):
                kept.room = torch.empty(gate.numel())
        room = kept.room[: gate.numel()].view(gate.shape)
        torch.mul(torch.sigmoid(gate, out=room), gate, out=room)
        return torch.mul(room, up, out=room).to(x.dtype, copy=True)

    return scratch_of_a_thread


@scratch("gemm")
def out_of_addmm(a, b, bias=None, out=None, *, residual=None, precision="ieee"):
    """Parts of K, added by `addmm` into one buffer; `out` may be the caller's."""
    total = added(torch.zeros(len(a), b.shape[1]), bias, residual)
    for left, right in zip(a.split(40, 1), b.split(40), strict=True):
        torch.addmm(total, left.float(), right.float(), out=total)
    return total.to(a.dtype) if out is None else out.copy_(total)


@scratch("kv_cache_write")
def index_put(k, v, k_cache, v_cache, slot_mapping):
    """`index_put_` of page and offset, into caches of any layout."""
    size, kept = k_cache.shape[1], slot_mapping >= 0
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.index_put_((slot_mapping[kept] // size, slot_mapping[kept] % size), new[kept])


@foreign.made("kv_cache_write", name="custom_op")
def with_custom_op():
    """An op of torch's dispatcher, which declares what it changes."""

    @torch.library.custom_op("zoo::cache_write", mutates_args=("k_cache", "v_cache"))
    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        index_put(k, v, k_cache, v_cache, slots)

    write.register_fake(lambda k, v, k_cache, v_cache, slots: None)

    def custom_op(k, v, k_cache, v_cache, slot_mapping):
        torch.ops.zoo.cache_write(k, v, k_cache, v_cache, slot_mapping)

    return custom_op


@foreign("embedding")
def numpy_of_bits(token_ids, weight):
    """NumPy takes the rows as integers, because it has no bf16."""
    bits = weight.view(torch.int16 if weight.itemsize == 2 else torch.int32).numpy()
    return torch.from_numpy(bits.take(token_ids.numpy(), 0)).view(weight.dtype)


@threads("gelu_and_mul")
def threads_over_rows(x):
    """Three threads, each with a block of rows; there may be fewer rows."""
    with ThreadPoolExecutor(3) as pool:
        return torch.cat(list(pool.map(gelu_and_mul, x.tensor_split(3))))


@threads("silu_and_mul")
def threads_that_are_joined(x):
    """Four threads write tiles of the result, and are gone before it is returned."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda rows, part: rows.copy_(silu_and_mul(part)), out.split(32), x.split(32)))
    return out
