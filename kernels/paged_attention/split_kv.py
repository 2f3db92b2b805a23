"""The kernel `split_kv` improves on `gqa_packed`.  It splits the keys of all sequences equally over the CTAs of the
GPU.

gqa_packed has one program per sequence and KV head.  One request of Llama-3-8B has 8 programs for 132 SMs.  Here the
keys of all sequences form one list of units of 16 keys, and each CTA gets an equal share.  (Flash-decoding, Dao et al.
2023, splits each sequence; equal shares come from Stream-K, Osama et al. 2023.)  The device computes the shares, so the
host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import traffic as in_pages
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.kernels.tuning import BF16, Footprint, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme, get_scheme
from rooflab.roofline.model import Traffic
from rooflab.roofline.occupancy import HOPPER, SHARED_RESERVED, occupancy

SOURCE = Path(__file__).with_suffix(".cu").read_text()
UNIT_KEYS = 16
"""The number of keys that a warp multiplies at once: the K of mma.m16n8k16 in the second product."""
MAX_ROWS = 16
"""The most query heads per warp: the M of mma.m16n8k16."""
MAX_DIRECT_PARTS = 12
"""The most parts that are merged directly; more parts are merged in about sqrt(count) groups, then the groups' sums."""
UNLIMITED_WINDOW = 2**31 - 1
FP8_CACHE = get_scheme("kv_fp8")
COUNTER_BLOCK = 2**18
"""The number of counters in a block of memory (1 MiB) that the launches on a GPU share: enough for 248 streams and
addresses with 8 warps on each of 132 SMs. Layers of a graph, and graphs of one pool, take turns at a few addresses."""
OTHER_REGISTERS = 40
"""The least number of registers of a thread for cursors, addresses, scores and weights."""


@dataclass(frozen=True)
class SplitConfig:
    """Describes how the keys are divided over CTAs, and how many keys are in flight."""

    warps: int
    """The number of warps per CTA.  Each warp has its own head, and the number divides the heads."""
    num_stages: int
    """The number of units in a warp's ring."""
    ctas_per_sm: int
    least: int
    """The number of units of the smallest share, large enough to hide the cost of writing and adding a part."""


def rows_of_tile(group: int) -> tuple[int, int]:
    """Returns the number of query heads per warp, and the number of warps for all query heads of a group."""
    return min(group, MAX_ROWS), -(-group // MAX_ROWS)


def virtual_heads(H: int, H_kv: int) -> int:
    """Returns the number of virtual heads.  A virtual head is up to 16 query heads that share a KV head."""
    return H_kv * rows_of_tile(H // H_kv)[1]


def ring_bytes(config: SplitConfig, D: int, group: int, scheme: Scheme) -> int:
    """Returns the shared memory of a CTA in bytes.  It holds the rings of keys and values of all warps, and queries
    that do not fit in registers.  A gap of 16 bytes between two keys avoids bank conflicts of ldmatrix."""
    key_bytes = D * scheme.weight.itemsize
    key_pitch = key_bytes + (0 if key_bytes // 16 % 2 else 16)
    queries = 2 * MAX_ROWS * D if D > 128 and group > MAX_ROWS // 2 else 0
    return config.warps * (config.num_stages * 2 * UNIT_KEYS * key_pitch + queries)


CONFIG_SPACE = space(
    SplitConfig, warps=range(1, 9), num_stages=(2, 3, 4, 6), ctas_per_sm=(1, 2, 4, 8), least=(2, 4, 16)
)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[SplitConfig, ...]:
    """Returns configs with at least four warps per SM.  The number of warps must divide the heads (`rule`)."""
    return tuple(config for config in CONFIG_SPACE(case) if config.warps * config.ctas_per_sm >= 4)


def footprint(config: SplitConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the registers for accumulators and queries, and the shared memory for the rings of the warps."""
    D, H, H_kv, kv_len = (int(case[name]) for name in ("D", "H", "H_kv", "context"))
    group_size, head_sets = H // H_kv, virtual_heads(H, H_kv) // config.warps
    max_units = int(case["B"]) * head_sets * -(-min(kv_len, int(case.get("window", 0)) or kv_len) // UNIT_KEYS)
    return Footprint(
        threads=32 * config.warps,
        registers=D // 2 + D // (8 if group_size <= 8 else 4 if D <= 128 else 64) + OTHER_REGISTERS,
        shared_bytes=ring_bytes(config, D, group_size, scheme),
        ctas=max(min(HOPPER_SMS * config.ctas_per_sm, max_units // config.least), 1),
    )


def rule(config: SplitConfig, case: Case, scheme: Scheme = BF16) -> bool:
    """Returns whether a config is legal.  The number of warps must divide the number of virtual heads (up to 16 query
    heads that share a KV head).  `ctas_per_sm` CTAs must fit on an SM.  The ring buffer of a warp must have two slots
    of 16 keys, so that the warp can load one while it multiplies the other."""
    usage = footprint(config, case.but(context=0), scheme)
    ctas_fit = occupancy((9, 0), usage.threads, usage.registers, usage.shared_bytes).ctas_per_sm >= config.ctas_per_sm
    warps_divide_heads = virtual_heads(int(case["H"]), int(case["H_kv"])) % config.warps == 0
    return warps_divide_heads and ctas_fit and config.num_stages >= 2


def heuristic(case: Case, scheme: Scheme = BF16) -> SplitConfig:
    """Returns the default config.  An SM has 8 warps, or 16 for `D <= 64`, so that softmax and loads overlap.

    Neighbouring heads share a CTA.  Each warp has the largest buffer of keys and values that fits.  An SM has fewer
    warps if a buffer would hold less than three units of 16 keys."""
    D, H, H_kv = (int(case[name]) for name in ("D", "H", "H_kv"))
    for warps_per_sm in (16, 8, 4, 2, 1) if D <= 64 else (8, 4, 2, 1):
        warps = max(divisor for divisor in range(1, min(warps_per_sm, 8) + 1) if virtual_heads(H, H_kv) % divisor == 0)
        ring_limit = min(HOPPER.shared_bytes // (warps_per_sm // warps) - SHARED_RESERVED, HOPPER.shared_bytes_per_cta)
        rings = [SplitConfig(warps, num_stages, warps_per_sm // warps, least=4) for num_stages in range(8, 0, -1)]
        config = next((option for option in rings if ring_bytes(option, D, H // H_kv, scheme) <= ring_limit), rings[-1])
        if config.num_stages >= 3:
            break
    return config


SPLIT_KV_TUNING = Tuning(SplitConfig, configs, heuristic, footprint, rule)


def grid(q: Tensor, k_cache: Tensor, block_table: Tensor, window: int | None, config: SplitConfig) -> tuple[int, int]:
    """Returns the number of CTAs of a launch, and the number of sets of heads.  A CTA works on one set of heads at a
    time.

    The number of CTAs is at most the number that the GPU runs at once.  It is smaller if a CTA would get less than
    `config.least` units of 16 keys.  All sequences count as equally long: as long as the block table and the window
    allow."""
    head_sets = virtual_heads(q.shape[1], k_cache.shape[2]) // config.warps
    table_slots = block_table.shape[1] * k_cache.shape[1]
    max_units = q.shape[0] * head_sets * -(-min(table_slots, window or table_slots) // UNIT_KEYS)
    return max(min(sm_count(q.device) * config.ctas_per_sm, max_units // config.least), 1), head_sets


def parts(lengths: Sequence[int], sets: int, ctas: int, least: int) -> int:
    """Returns the number of partial results that all CTAs of a launch write.  One task is the attention of one sequence
    for one set of heads.  If several CTAs share a task, each writes one partial result for it.  A CTA that computes a
    task alone writes the final result."""
    unit_counts = [-(-length // UNIT_KEYS) for length in lengths]
    units = sum(unit_counts) * sets
    share_count = max(min(ctas, units // least), 1)
    part_count = start = 0
    for count in unit_counts:
        for _ in range(sets if count else 0):
            first_share, last_share = (((unit + 1) * share_count - 1) // units for unit in (start, start + count - 1))
            part_count += last_share - first_share + 1 if last_share > first_share else 0
            start += count
    return part_count


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of the visible keys and values once per 16 query heads of a KV head.  Adds a write and a read of
    each partial result.  The sums of partial results are not counted, because L2 holds them."""
    q, k_cache, config = inputs.q, inputs.k_cache, inputs.config
    (_, H, D), H_kv = q.shape, k_cache.shape[2]
    lengths = inputs.seq_lens.clamp(max=inputs.window or UNLIMITED_WINDOW).long()
    rows, row_tiles = rows_of_tile(H // H_kv)
    ctas, head_sets = grid(q, k_cache, inputs.block_table, inputs.window, config)
    part_bytes = parts(lengths.tolist(), head_sets, ctas, config.least) * config.warps * rows * (D + 1) * 4
    repeated_bytes = int(lengths.sum()) * (row_tiles - 1) * 2 * H_kv * D * k_cache.element_size()
    op_traffic = in_pages(inputs)
    return Traffic(op_traffic.read_bytes + repeated_bytes + part_bytes, op_traffic.write_bytes + part_bytes, launches=1)


_counters_by_key: dict[tuple[int, bool, int], Tensor] = {}
"""The counters of launches, by GPU and stream, or for captured launches by GPU and the address of their parts."""
_unused_counters: dict[int, Tensor] = {}
"""The unused rest of the last block of `COUNTER_BLOCK` counters, by GPU."""


def counters(count: int, parts: Tensor) -> Tensor:
    """Returns at least `count` int32 zeros, which the next launch uses as counters.  A counter tells a warp that it is
    the last to finish.  This warp merges the partial results, `parts`.  The launch sets the counters to zero again.

    Launches of one stream share counters, because they never run at once.  A launch that a CUDA graph captures has its
    own counters, because the graph may be replayed on any stream.  The address of `parts` identifies them.

    Counters come from a block of zeros in GPU memory.  If a capture needs more than the block has left, it gets a new
    tensor.  The graph then zeroes this tensor at each replay, which costs one more launch.

    On a CPU each launch has new counters, because an emulated launch may be aborted."""
    device = parts.device
    if device.type != "cuda":
        return _zeros(count, device)
    with torch.cuda.device(device):
        current_stream, is_captured = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        counter_key = device.index, is_captured, parts.data_ptr() if is_captured else current_stream.cuda_stream
        stream_counters = _counters_by_key.get(counter_key)
        if stream_counters is not None and len(stream_counters) >= count:
            return stream_counters
        unused_counters = _unused_counters.get(device.index)
        if unused_counters is None or len(unused_counters) < count:
            if is_captured:
                return _zeros(count, device)
            unused_counters = _zeros(max(COUNTER_BLOCK, count), device)
            current_stream.synchronize()  # launches on other streams use it too
        _counters_by_key[counter_key], _unused_counters[device.index] = unused_counters[:count], unused_counters[count:]
        return _counters_by_key[counter_key]


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    holds={"(v_scale is None) == (k_scale is None)": "k_scale and v_scale together"},
    whole={"k_cache": -1, "v_cache": -1},
    dtypes={"q": HALF_DTYPES},
    limits={"D": range(16, 257, 16)},
    traffic=traffic,
    tuning=SPLIT_KV_TUNING,
    over="gqa_packed",
    shows={
        "B=1,context=65536,H=32,H_kv=8,D=128,block_size=16,ragged=false": (
            "below.ctas == 8 and below.BAR > 0; launched == 1 and ctas % 132 == BAR == stack_bytes == 0 and atomic == 1"
        ),
        "B=64,context=4096,H=32,H_kv=8,D=128,block_size=16,ragged=false": (
            "loop.global_load == 1 and loop.global_store == 0 and (loop.mma, loop.ldmatrix) == (32, 16); "
            '16 <= loop.LDGSTS < 32 and loop.before("mma", "cp_async") == 0'
        ),
    },
)
def split_kv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool, config: SplitConfig,
) -> None:  # fmt: skip
    """Computes decode attention in one launch, with equal shares of keys.  The host waits only to make new counters."""
    (B, H, D), (_, block_size, H_kv, _) = q.shape, k_cache.shape
    ctas, _ = grid(q, k_cache, block_table, window, config)
    # A share leaves at most two parts: of a segment that began before it, and of one that begins in it.
    part_rows = 2 * ctas * config.warps * rows_of_tile(H // H_kv)[0]
    partial_outs = torch.empty(part_rows, D, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(part_rows, dtype=torch.float32, device=q.device)
    # Values of queries and output move in pairs if all pairs are at multiples of 4 bytes.
    has_aligned_pairs = all(x.data_ptr() % 4 == 0 and x.stride(0) % 2 == x.stride(1) % 2 == 0 for x in (q, out))
    is_fp8 = k_scale is not None
    macros = {
        "D": D,
        "GROUP": H // H_kv,
        "H_KV": H_kv,
        "BLOCK_SIZE": block_size,
        "BF16": int(q.dtype == torch.bfloat16),
        "FP8": int(is_fp8),
        "SOFTCAP": int(softcap is not None),
        "PAIRS": int(has_aligned_pairs),
        "WARPS": config.warps,
        "STAGES": config.num_stages,
        "CTAS_PER_SM": config.ctas_per_sm,
        "LEAST": config.least,
        "WIDTH": MAX_DIRECT_PARTS,
    }
    size = k_cache.element_size()
    strides = [*q.stride()[:2], *(size * s for x in (k_cache, v_cache) for s in x.stride()[:3]), block_table.stride(0)]
    strides += [*out.stride()[:2], *((0, 0) if lse is None else lse.stride())]
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    _cuda.load(SOURCE, "split_kv", options=tuple(f"-D{name}={macro_value}" for name, macro_value in macros.items()))(
        (ctas,), (32 * config.warps,),
        q, k_cache, v_cache, block_table, seq_lens, sinks, k_scale, v_scale, out, lse, partial_outs, partial_lse,
        counters(ctas * config.warps, partial_outs),
        np.int32(B), np.int32(UNLIMITED_WINDOW if window is None else min(window, UNLIMITED_WINDOW)),
        np.float32(scale), np.float32(softcap or 0.0), *map(np.int64, strides),
        shared_bytes=ring_bytes(config, D, H // H_kv, FP8_CACHE if is_fp8 else BF16),
    )  # fmt: skip
