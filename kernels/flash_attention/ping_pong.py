"""Over online, in Gluon: FlashAttention-3 (Shah et al., arXiv 2407.08608), which hides the exponentials.

One warp loads queries, keys and values by TMA and runs ahead through rings in shared memory, also into the next tile of
queries.  Two warpgroups have 64 rows of queries and an accumulator each.  They take turns: one computes exponentials
while the tensor cores work for the other.  Each also starts the next block's scores before it waits for this block's
values, so its own products overlap its exponentials too.  Gluon has no named barriers: the turn is one mbarrier each,
and costs a barrier of four warps; a step has five.

Tried, predicted, not built: docs/notes/flash_attention.md.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._attention import LOG2E, SMALLEST_SCALE, Returned, get_scale, outputs
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._layouts import HEADS
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import ALIGNMENT, BARRIER_BYTES, unchecked_map
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.flash_attention._maps import nothing_seen, why_not_mapped
from rooflab.kernels.flash_attention._ping_pong_device import _attention
from rooflab.kernels.flash_attention._tiles import section_heads
from rooflab.kernels.flash_attention._timeline import TIMELINE
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.attention import check_options
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.model import Traffic

WARPGROUP = 128
"""Threads of a consumer, and of the producer warp's warpgroup, as setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = 24
"""Registers per thread after setmaxnreg, a consumer's by their number."""
STEP_CLOCKS = {2: 1700, 3: 1990}
"""A step of all consumers together, for 128 keys and a head_dim of 64, by the model in this module's docstring."""
ADDRESS_REGISTERS = 24
"""For peak, sum, descriptors and loop counters, in addition to accumulator, scores and weights."""
OPERAND_BYTES = 2
"""Bytes of a value in the dtypes that the kernel takes."""
ROWS = 64
"""Rows of queries per consumer."""
BARRIERS = 3
"""Barriers of the queries and the turns per consumer; each stage has four more."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Keys per block, slots of each ring, and consumers."""

    block_n: int
    stages: int
    consumers: int
    lazy: bool = False
    """Whether earlier sums are rescaled only when a row's peak has grown by more than 8 in log2."""

    @property
    def block_m(self) -> int:
        """Rows of queries per CTA."""
        return ROWS * self.consumers


def _padded(head_dim: int) -> int:
    """Columns of a tile: TMA fills those past head_dim with zeros, and does not store them."""
    return max(64, int(next_power_of_2(head_dim)))


def _stages_in_queries(head_dim: int) -> bool:
    """Whether the result is staged in the memory of the queries, because the rings need the rest."""
    return _padded(head_dim) > 128


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Blocks whose scores a consumer can hold, with rings of several depths."""
    consumers = (2, 3) if _padded(int(case["D"])) == 64 else (2,)
    return tuple(itertools.starmap(Config, itertools.product((64, 128), (2, 3, 4, 5), consumers, (False, True))))


def _consumer_registers(config: Config, head_dim: int) -> int:
    """fp32 accumulator and scores and 16-bit weights, for 64 rows on 128 threads."""
    return _padded(head_dim) // 2 + config.block_n // 2 + config.block_n // 4 + ADDRESS_REGISTERS


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Average registers of the CTA's threads; queries, both rings, barriers, and the staged result.

    Causal programs differ in their work, so `tensor_flops` is 0.
    """
    B, T, H, D = (int(case[key]) for key in ("B", "T", "H", "D"))
    number = config.consumers
    rows = config.block_m * (1 if _stages_in_queries(D) else 2) + 2 * config.stages * config.block_n
    registers = (number * _consumer_registers(config, D) + PRODUCER_REGISTERS) // (number + 1)
    return Footprint(
        threads=(number + 1) * WARPGROUP,
        registers=registers,
        shared_bytes=rows * _padded(D) * OPERAND_BYTES + (BARRIERS * number + 4 * config.stages) * BARRIER_BYTES,
        ctas=min(cdiv(T, config.block_m) * B * H, HOPPER_SMS),
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and each of its consumers."""
    held = CONSUMER_REGISTERS[config.consumers]
    return footprint(config, case, scheme).fits and _consumer_registers(config, int(case["D"])) <= held


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The widest block that consumers and two slots can hold, more slots if they are small; for a head_dim of 64 the
    number of consumers whose rounds of tiles take fewer clocks."""
    B, T, H = (int(case[key]) for key in ("B", "T", "H"))
    width = _padded(int(case["D"]))
    if width > 64:
        return Config(128 if width == 128 else 64, 2, 2)
    rounds = {number: cdiv(cdiv(T, ROWS * number) * B * H, HOPPER_SMS) for number in STEP_CLOCKS}
    return Config(128, 4, min(STEP_CLOCKS, key=lambda number: rounds[number] * STEP_CLOCKS[number]))


def why_not_taken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None) -> str | None:
    """Why TMA cannot load these tensors or wgmma cannot multiply them, or None."""
    if q.dtype == torch.float32:
        return "q: expected torch.float16 or torch.bfloat16, as wgmma rounds torch.float32; online takes it"
    if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= 256:
        return f"q: expected a head_dim of whole 16 bytes up to 256, got {q.shape[-1]}"
    if softmax_scale is not None and softmax_scale < 0:
        return f"softmax_scale: expected 0 or more, got {softmax_scale}; flash_attention/online takes it"
    return next((reason for name, x in (("q", q), ("k", k), ("v", v)) if (reason := why_not_mapped(name, x))), None)


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a section's keys and values for its tiles of queries."""
    q, k, window = inputs.q, inputs.k, inputs.window
    S, size = k.shape[1], q.element_size()
    keys_read = S if window is None else min(S, q.shape[1] - 1 + window)
    lse = 4 * q.numel() // max(1, q.shape[-1]) if inputs.return_lse else 0
    read = (q.numel() + (k.numel() + inputs.v.numel()) * keys_read / max(1, S)) * size
    return Traffic(read, q.numel() * size + lse)


def _map(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """The tensor map of x (B, T, H, D) as (B, H, T, D), in boxes of `rows` rows of a head; ends with each sequence."""
    B, T, H, D = x.shape
    tile = [1, 1, rows, _padded(D)]
    strides = [x.stride(dim) if x.shape[dim] > 1 else ALIGNMENT for dim in (0, 2, 1)]
    return unchecked_map(TensorDescriptor, x, [B, H, T, D], [*strides, 1], tile, HEADS)


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
    """Attention whose exponentials overlap its products.  q: (B, T, H, D); k, v: (B, S, H_kv, D), fp16 or bf16.

    Returns (B, T, H, D), and with `return_lse` the log-sum-exp (B, T, H) fp32.  Addresses and strides of q, k, v and
    out are whole 16 bytes, D is a multiple of 8.  Raises `ValueError` on wrong shapes, dtypes or strides.
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
    _attention[(min(cdiv(T, config.block_m) * heads, sm_count(q.device)),)](
        _map(q, ROWS), _map(k, config.block_n), _map(v, config.block_n), _map(out, ROWS), lse,
        *((0, 0, 0) if lse is None else lse.stride()), sinks, 0 if sinks is None else sinks.stride(0), T, S, H, group,
        heads, min(heads, section_heads(k, group)), window if window is not None and window < S else None,
        1.0 if softcap else scale * LOG2E, 2 * LOG2E * scale / softcap if softcap else None,
        softcap * LOG2E if softcap else None, TIMELINE.get(),
        D=_padded(D), CAUSAL=causal, OUT_IN_Q=_stages_in_queries(D), num_warps=4, **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)
