"""Over naive: one launch writes k and v of each token to its slot; the kernel skips tokens without a slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._head_tiles import Config, tiles
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 24
"""For pointers and masks, in addition to the values."""


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """A tile of k and one of v in registers, in the dtype of the cache."""
    threads = 32 * config.num_warps
    block_d, block_heads = _blocks(config, int(case["H_kv"]), int(case["D"]))
    registers = cdiv(2 * block_d * block_heads * scheme.activation.itemsize, 4 * threads)
    ctas = int(case["T"]) * cdiv(int(case["H_kv"]), block_heads)
    return Footprint(threads, registers + ADDRESS_REGISTERS, 0, ctas)


def _blocks(config: Config, H_kv: int, D: int) -> tuple[int, int]:
    """The tile of a program: a head, and the number of heads."""
    block_d = int(next_power_of_2(D))
    return block_d, min(int(next_power_of_2(H_kv)), max(config.tile // block_d, 1))


# Eight values of k and eight of v for each of 128 threads.
TUNING = Tuning(Config, tiles(256, 32), Defaults((({}, Config(tile=1024, num_warps=4)),)), footprint)


@triton.jit
def _kv_cache_write(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, num_slots, num_kv_heads,
    stride_kt, stride_kh, stride_vt, stride_vh, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    # Offsets are int64: slot * H_kv * D passes 2**31 in a bf16 cache of 4 GiB, and head * stride in a long prefill
    # whose heads are far apart.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    # A slot past the cache is skipped too, so the kernel never writes outside the cache.
    if (slot >= 0) & (slot < num_slots):
        heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]).to(tl.int64)
        columns = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < num_kv_heads) & (columns < D)
        k = tl.load(k_ptr + token * stride_kt + heads * stride_kh + columns, mask=mask)
        v = tl.load(v_ptr + token * stride_vt + heads * stride_vh + columns, mask=mask)
        target = slot * num_kv_heads * D + heads * D + columns
        tl.store(k_cache_ptr + target, k, mask=mask)
        tl.store(v_cache_ptr + target, v, mask=mask)


def traffic(inputs: Arguments) -> Traffic:
    """All slots are read; the rows of tokens with a slot are read and written."""
    k, slot_mapping = inputs.k, inputs.slot_mapping
    written = int((slot_mapping >= 0).sum())
    moved = written * k.shape[1] * k.shape[2] * (k.element_size() + inputs.v.element_size())
    return Traffic(read_bytes=nbytes(slot_mapping) + moved, write_bytes=moved)


@kernel(
    backend="triton", traffic=traffic, tuning=TUNING,
    over="naive", shows={"": 'calls("naive").total >= 6 and launched == 1; STG_E_128 == global_store == 2'},
)  # fmt: skip
def fused(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, config: Config) -> None:
    """Skips a slot that is negative or past the cache."""
    T, H_kv, D = k.shape
    block_d, block_heads = _blocks(config, H_kv, D)
    _kv_cache_write[(T, cdiv(H_kv, block_heads))](
        k, v, k_cache, v_cache, slot_mapping, k_cache.shape[0] * k_cache.shape[1], H_kv, *k.stride()[:2],
        *v.stride()[:2],
        D=D, BLOCK_D=block_d, BLOCK_HEADS=block_heads, num_warps=config.num_warps,
    )  # fmt: skip
