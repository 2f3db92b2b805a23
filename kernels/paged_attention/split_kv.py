"""Over gqa_packed: cuts the keys of all sequences into equal shares, one for every CTA that fits on the GPU.

gqa_packed has one program per sequence and KV head: 8 for one request of Llama-3-8B on 132 SMs, and as many steps as
the longest sequence needs if lengths differ.  Here the units of 16 keys of all sequences form one sequence, and a CTA's
share begins and ends anywhere in it (flash-decoding, Dao et al. 2023, splits each sequence; equal shares come from
Stream-K, Osama et al. 2023).  The device computes the shares from seq_lens, so the host does not wait.

Tried, predicted, not built: docs/notes/paged_attention.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._attention import get_scale, strides_of
from rooflab.kernels._hopper_device import BARRIERS
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._configs import SPLIT_KV, SplitConfig, heads_of
from rooflab.kernels.paged_attention._split_counters import counters
from rooflab.kernels.paged_attention._split_work import (
    MOST_HEAD_DIM,
    WIDTH,
    grid,
    parts,
    ring_bytes,
    rows_of_tile,
    unaligned,
    virtual_heads,
)
from rooflab.kernels.registry import registered
from rooflab.kernels.takes import HALVES
from rooflab.kernels.tuning import BF16
from rooflab.reference.pages import used_slots
from rooflab.reference.spec import DTYPE_NAMES, Arguments, Case, get_scheme, nbytes
from rooflab.roofline.model import Traffic

NO_WINDOW = 2**31 - 1
FP8_CACHE = get_scheme("kv_fp8")
PARTS = ("_split_device.cu", "_split_combine.cu", "_split_main.cu")
SOURCE = "\n".join((BARRIERS, *((Path(__file__).parent / part).read_text() for part in PARTS)))


def why_not_taken(inputs: Arguments) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    other = "; paged_attention/chunked takes any"
    if (inputs.k_scale is None) != (inputs.v_scale is None):
        return "v_scale: expected k_scale and v_scale together, got one; paged_attention/chunked takes one"
    for name, cache in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        if unaligned(cache):
            return f"{name}: expected keys and values at multiples of 16 bytes, got strides {cache.stride()}{other}"
    return None


def config_of(inputs: Arguments) -> SplitConfig:
    """The config that a call takes unless it is given one."""
    (B, H, D), H_kv, device = inputs.q.shape, inputs.k_cache.shape[2], inputs.q.device
    scheme = get_scheme(DTYPE_NAMES[inputs.q.dtype] if inputs.k_scale is None else "kv_fp8")
    sizes = {"B": B, "H": H, "H_kv": H_kv, "D": D}
    config: SplitConfig = registered("paged_attention", "split_kv").config_for(Case(**sizes), scheme, device)
    return config


def traffic(inputs: Arguments) -> Traffic:
    """Each sequence's visible keys and values once, a page that several sequences share once for each; the shares'
    parts, written and read; q, the output, and the table once, because L2 keeps it, as it keeps the sums of groups of
    parts, which take the places of parts."""
    q, k_cache, block_table, seq_lens = inputs.q, inputs.k_cache, inputs.block_table, inputs.seq_lens
    window, k_scale = inputs.window, inputs.k_scale
    B, H, D = q.shape
    H_kv = k_cache.shape[2]
    case = Case(B=B, H=H, H_kv=H_kv, D=D, context=0)
    config = inputs.config or config_of(inputs)
    lengths = seq_lens.clamp(max=window or NO_WINDOW).long()
    _, entries = used_slots(block_table, seq_lens, k_cache.shape[0], k_cache.shape[1], seq_lens - lengths)
    row_tiles = rows_of_tile(H // H_kv)[1]
    keys = int(lengths.sum()) * row_tiles * 2 * H_kv * D * k_cache.element_size()
    sets = heads_of(case) // config.warps
    slots = block_table.shape[1] * k_cache.shape[1]
    ctas = grid(B, slots, window, sets, config.ctas_per_sm, config.least, q.device)
    left = parts(lengths.tolist(), sets, ctas, config.least)
    kept = left * config.warps * rows_of_tile(H // H_kv)[0] * (D + 1) * 4
    read = keys + 4 * entries + nbytes(q, seq_lens, inputs.sinks, k_scale, inputs.v_scale)
    return Traffic(read + kept, nbytes(q) + kept + (4 * B * H if inputs.return_lse else 0), launches=1)


def _launch(
    tensors: tuple[Tensor | None, ...], scale: float, window: int | None, softcap: float | None, config: SplitConfig
) -> None:
    """The launch; `tensors` are the kernel's tensor arguments in order, up to the log-sum-exp."""
    q, k_cache, v_cache, table, seq_lens, sinks, k_scale, v_scale, out, lse = tensors
    assert q is not None and k_cache is not None and v_cache is not None and table is not None
    assert seq_lens is not None and out is not None
    (B, H, D), (_, block_size, H_kv, _) = q.shape, k_cache.shape
    sets = virtual_heads(H, H_kv) // config.warps
    slots = table.shape[1] * block_size
    ctas = grid(B, slots, window, sets, config.ctas_per_sm, config.least, q.device)
    rows = rows_of_tile(H // H_kv)[0]
    kept = 2 * ctas * config.warps * rows
    partial = torch.empty(kept, D, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(kept, dtype=torch.float32, device=q.device)
    scheme = BF16 if k_scale is None else FP8_CACHE
    # Values of queries and output move in pairs if all pairs are at multiples of 4 bytes.
    even = all(x.data_ptr() % 4 == 0 and x.stride(0) % 2 == x.stride(1) % 2 == 0 for x in (q, out))
    sizes = {
        "D": D,
        "GROUP": H // H_kv,
        "H_KV": H_kv,
        "BLOCK_SIZE": block_size,
        "BF16": int(q.dtype == torch.bfloat16),
        "FP8": int(k_scale is not None),
        "SOFTCAP": int(softcap is not None),
        "PAIRS": int(even),
        "WARPS": config.warps,
        "STAGES": config.num_stages,
        "CTAS_PER_SM": config.ctas_per_sm,
        "LEAST": config.least,
        "BULK": int(config.bulk),
        "WIDTH": WIDTH,
    }
    options = tuple(f"-D{name}={value}" for name, value in sizes.items())
    size = k_cache.element_size()
    strides = [*q.stride()[:2], *(size * s for x in (k_cache, v_cache) for s in x.stride()[:3]), table.stride(0)]
    to = [np.int64(s) for s in (*out.stride()[:2], *strides_of(lse, 2))]
    seen = np.int32(NO_WINDOW if window is None else min(window, NO_WINDOW))
    _cuda.load(SOURCE, "split_kv", options=options)(
        (ctas,),
        (32 * (config.warps + config.bulk),),
        *tensors,
        partial,
        partial_lse,
        counters(ctas * config.warps, partial),
        np.int32(B),
        seen,
        np.float32(scale),
        np.float32(softcap or 0.0),
        *(np.int64(stride) for stride in strides),
        *to,
        shared_bytes=ring_bytes(config.warps, config.num_stages, D, H // H_kv, scheme, config.bulk),
    )


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), unsupported=why_not_taken,
    dtypes={"q": HALVES}, limits={"D": range(16, MOST_HEAD_DIM + 1, 16)}, instead="paged_attention/chunked",
    aligned=("k_cache", "v_cache"), traffic=traffic, tuning=SPLIT_KV,
)  # fmt: skip
def split_kv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool, config: SplitConfig,
) -> None:  # fmt: skip
    """Equal shares of all keys, in one launch.  Does not wait for the device."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if config.bulk and cache.shape[2] > 1 and cache.stride(2) != cache.shape[3]:
            wanted = f"the heads of a token next to each other for bulk=True (stride {cache.shape[3]})"
            raise ValueError(f"{name}: expected {wanted}, got stride {cache.stride(2)}")
    tensors = (q, k_cache, v_cache, block_table, seq_lens, sinks, k_scale, v_scale, out, lse)
    _launch(tensors, get_scale(q, softmax_scale), window, softcap, config)
