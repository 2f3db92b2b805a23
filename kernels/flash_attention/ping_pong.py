"""Over online, in Gluon: FlashAttention-3 (Shah et al., arXiv 2407.08608), which hides the exponentials.

One warp asks TMA for queries, keys and values and runs ahead through rings of shared memory, into the next tile of
queries too.  Two warpgroups have 64 rows of queries each and an accumulator of their own.  They hand a turn to each
other, so that one takes its exponentials while the tensor cores work for the other; and each asks for the next block's
scores before it waits for this block's values, so that its own products run under its exponentials as well.  Gluon has
no named barriers: the turn is an mbarrier for each, and costs a barrier of four warps, of which a step has five.

Masks are only in the blocks that the diagonal, the window's far end or the end of the keys crosses: the last block of
a tile, and loops of their own.  A CTA stays and takes one tile after another.  The heads of a section, whose keys and
values fit L2 together, come before the next section's; a section's tiles go from long to short or from short to long
in turns, the last from long to short, and rounds go to and fro over the CTAs.  With that the busiest of 132 CTAs has at
most 3.2% more blocks than the mean in the causal shapes of tests/test_flash_attention_ping_pong.py (computed).

A step of 128 keys and a head of 128 is 2048 clocks of the tensor cores for both consumers, and about 510 instructions a
warp, two warps on a scheduler, 66 of them exponentials at 8 clocks each (read in the SASS): a prediction is that the
tensor cores bound it.  With a head of 64 it is 1024 clocks against 1056 of exponentials, which then bound it.
No loop spills; causal with a head of 128, four scalars of a tile are kept in local memory beside its loops.

Tried, and seen in the compiled code alone: the wait for the values' product with no loop before it, which the assembler
moved before the exponentials, though it was said to depend on their sum; weights carried from step to step as 16-bit
tensors, which took 64 permutations a step to take apart and put together, and in fp32, which rounds them between the
two products; rescaling the accumulator after the wait and not between the two products, where the next scores hide it;
all sections from long to short, which left the busiest CTA up to 30% more blocks.  Not done: FlashAttention-3's 176
keys a block (Gluon's tiles are powers of two, so that heads of 80, 96 and 192 are padded to 128 and 256 as well), three
consumers for a head of 64, heads of one group packed into a tile.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._attention import LOG2E, Returned, check_options, get_scale, outputs
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._tma import ALIGNMENT, BARRIER_BYTES
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.flash_attention._maps import nothing_seen, why_not_mapped
from rooflab.kernels.flash_attention._ping_pong_device import _attention
from rooflab.kernels.flash_attention._tiles import section_heads
from rooflab.kernels.flash_attention._timeline import TIMELINE
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.model import Traffic

THREADS = 384
"""Two consumers and the group of warps that the producer is one of, because registers are moved between groups."""
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
"""What setmaxnreg leaves a thread."""
ADDRESS_REGISTERS = 24
"""Peak, sum, descriptors and the loop's counters, beside accumulator, scores and weights."""
OPERAND_BYTES = 2
"""Of the dtypes that the kernel takes."""
TILE_M = 128
"""Rows of queries of a CTA, half of them a consumer's."""
BARRIERS = 6
"""Of the queries and the turns; four more for every stage."""
SMALLEST_SCALE = 2.0**-100
"""In place of a scale of 0, which would make NaN of a masked score: every weight is 1 all the same."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Keys of a block, and slots of each ring."""

    block_n: int
    stages: int


def _padded(head_dim: int) -> int:
    """Columns of a tile: TMA fills those past the head with zeros, and stores none of them."""
    return max(64, int(triton.next_power_of_2(head_dim)))


def _stages_in_queries(head_dim: int) -> bool:
    """Whether the result is staged where the queries were, because the rings need the rest of shared memory."""
    return _padded(head_dim) > 128


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Blocks that a consumer can hold the scores of, with every depth of ring."""
    return tuple(itertools.starmap(Config, itertools.product((64, 128), (2, 3, 4, 5))))


def _consumer_registers(config: Config, head_dim: int) -> int:
    """An accumulator and scores in fp32, and weights in 16 bits, of 64 rows on 128 threads."""
    return _padded(head_dim) // 2 + config.block_n // 2 + config.block_n // 4 + ADDRESS_REGISTERS


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers on the average of the CTA's threads; queries, both rings, barriers, and what is staged of a result.

    Causal programs differ in their work, so `tensor_flops` stays 0.
    """
    B, T, H, D = (int(case[key]) for key in ("B", "T", "H", "D"))
    rows = TILE_M * (1 if _stages_in_queries(D) else 2) + 2 * config.stages * config.block_n
    registers = (2 * _consumer_registers(config, D) + PRODUCER_REGISTERS) // 3
    return Footprint(
        threads=THREADS,
        registers=registers,
        shared_bytes=rows * _padded(D) * OPERAND_BYTES + (BARRIERS + 4 * config.stages) * BARRIER_BYTES,
        ctas=min(triton.cdiv(T, TILE_M) * B * H, HOPPER_SMS),
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """What a CTA can hold, and each of its consumers."""
    return footprint(config, case, scheme).fits and _consumer_registers(config, int(case["D"])) <= CONSUMER_REGISTERS


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The widest block that consumers and two slots can hold; more slots where they are small."""
    width = _padded(int(case["D"]))
    return Config(128 if width <= 128 else 64, 4 if width == 64 else 2)


def why_not_taken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None) -> str | None:
    """What TMA cannot load, and wgmma not take."""
    if q.dtype == torch.float32:
        return "q: expected torch.float16 or torch.bfloat16, as wgmma rounds torch.float32; online takes it"
    if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= 256:
        return f"q: expected a head_dim of whole 16 bytes up to 256, got {q.shape[-1]}"
    if softmax_scale is not None and softmax_scale < 0:
        return f"softmax_scale: expected 0 or more, got {softmax_scale}; flash_attention/online takes it"
    return next((reason for name, x in (("q", q), ("k", k), ("v", v)) if (reason := why_not_mapped(name, x))), None)


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, as L2 holds a section's keys and values while its tiles of queries read them."""
    q, k, window = inputs.q, inputs.k, inputs.window
    S, size = k.shape[1], q.element_size()
    asked = S if window is None else min(S, q.shape[1] - 1 + window)
    lse = 4 * q.numel() // max(1, q.shape[-1]) if inputs.return_lse else 0
    read = (q.numel() + (k.numel() + inputs.v.numel()) * asked / max(1, S)) * size
    return Traffic(read, q.numel() * size + lse)


def _map(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """The tensor map of x (B, T, H, D) as (B, H, T, D) whose boxes are `rows` of a head; it ends with each sequence."""
    B, T, H, D = x.shape
    tile = [1, 1, rows, _padded(D)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    strides = [x.stride(dim) if x.shape[dim] > 1 else ALIGNMENT for dim in (0, 2, 1)]
    return TensorDescriptor(x, [B, H, T, D], [*strides, 1], tile, layout)


@register(
    op="flash_attention", name="ping_pong", role="optimized", backend="gluon", min_sm=90,
    unsupported=lambda inputs: why_not_taken(inputs.q, inputs.k, inputs.v, inputs.softmax_scale), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: Returned | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> Returned:
    """Attention whose exponentials run under its products.  q: (B, T, H, D); k, v: (B, S, H_kv, D), fp16 or bf16.

    Returns (B, T, H, D), and with `return_lse` the log-sum-exp (B, T, H) fp32.  Addresses and strides of q, k, v and
    out are whole 16 bytes, D is a multiple of 8.  Raises `ValueError` on shapes, dtypes or strides that do not fit.
    """
    check_args(q, k, v)
    check_options(q, causal, window, softcap, sinks)
    reason = why_not_taken(q, k, v, softmax_scale)
    if reason:
        raise ValueError(reason)
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    reason = why_not_mapped("out", out)
    if reason:
        raise ValueError(reason)
    B, T, H, D = q.shape
    S, group = k.shape[1], H // k.shape[2]
    if not out.numel() or S == 0:
        return nothing_seen(out, lse, sinks)
    config = config or default_config("flash_attention", "ping_pong", q.dtype, q.device, B=B, T=T, H=H, D=D)
    heads = B * H
    scale = max(get_scale(q, softmax_scale), SMALLEST_SCALE)
    _attention[(min(triton.cdiv(T, TILE_M) * heads, sm_count(q.device)),)](
        _map(q, TILE_M // 2), _map(k, config.block_n), _map(v, config.block_n), _map(out, TILE_M // 2), lse,
        *((0, 0, 0) if lse is None else lse.stride()), sinks, 0 if sinks is None else sinks.stride(0), T, S, H, group,
        heads, min(heads, section_heads(k, group)), window if window is not None and window < S else None,
        1.0 if softcap else scale * LOG2E, 2 * LOG2E * scale / softcap if softcap else None,
        softcap * LOG2E if softcap else None, TIMELINE.get(),
        D=_padded(D), CAUSAL=causal, OUT_IN_Q=_stages_in_queries(D), num_warps=4, **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)
