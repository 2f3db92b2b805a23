"""Computes the cost of each op in one prefill or decode step of a model, and the minimum time of the step.

The estimate assumes one kernel per op, and kernels that run one after another. Each kernel moves its inputs and outputs
through HBM once. The time of an op is the largest of its memory, arithmetic and launch times. The step's time is the
sum. A kernel that fuses two ops can be faster.

Tensor parallelism splits the heads, the MLP's width and the vocabulary. Each layer then has two all-reduces of a
`[tokens, hidden]` tensor in the activations' dtype. Since Hopper, some NVLink switches compute the sum (SHARP), and
each GPU sends the tensor's bytes once. Otherwise each of `n` GPUs sends `2 * (n - 1) / n` times these bytes (Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms", 2009). The latency of all-reduces is not counted, and no kernel
overlaps with them. The exchange of embeddings and logits is left out, because it has only about `1 / (2 * layers)` of
the bytes of the all-reduces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from rooflab.roofline.architecture import Architecture
from rooflab.roofline.device import Device
from rooflab.roofline.model import Ceilings, Cost, bound

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "int8": 1}
StepKind = Literal["decode", "prefill"]
MAX_GPUS = 8
"""The most GPUs of one node; between nodes the link is slower."""
_BLOCK_TOKENS = 16
_INDEX_BYTES, _LENGTH_BYTES = 8, 4


class OpCost(NamedTuple):
    """The cost of one op in a step, such as the QKV projection: `calls` calls, each at `cost`."""

    op: str
    calls: int
    cost: Cost
    site: str
    shape: Mapping[str, int] = {}
    """The shape of a product (M, N, K), or of attention (B, context, H, H_kv, D, and window; 0 means no window)."""


def activation_dtype(weight_dtype: str) -> str:
    """Returns the dtype of activations, embedding, norms and head: bf16 for 8-bit weights, else the weights' dtype."""
    return weight_dtype if ITEM_BYTES[weight_dtype] > 1 else "bf16"


def rmsnorm_cost(rows: int, width: int, item: int) -> Cost:
    """Returns the cost of RMSNorm over a `[rows, width]` tensor with `item` bytes per element."""
    return Cost(rows * width * item + width * item, rows * width * item, {}, 4.0 * rows * width, float(rows))


def gemm_cost(M: int, N: int, K: int, weight: str, activation: str, bias: bool = False) -> Cost:
    """Returns the cost of `C = A @ W.T`: activations `[M, K]` and weights `[N, K]`.  `C` has the activations' dtype."""
    item_bytes = ITEM_BYTES[activation]
    read_bytes = M * K * item_bytes + N * K * ITEM_BYTES[weight] + (N * item_bytes if bias else 0)
    return Cost(read_bytes, M * N * item_bytes, {weight: 2.0 * M * N * K}, float(M * N) if bias else 0.0)


def prefill_attention_cost(B: int, context: int, H: int, H_kv: int, D: int, window: int, dtype: str) -> Cost:
    """Returns the cost of causal attention over `B` prompts of `context` tokens.  Counts only query-key pairs that the
    mask allows.  A `window` of 0 means no window."""
    visible_keys = min(context, window or context)
    visible_pairs = B * H * (visible_keys * (visible_keys + 1) // 2 + (context - visible_keys) * visible_keys)
    head_bytes = B * context * D * ITEM_BYTES[dtype]
    return _attention(visible_pairs, D, H * head_bytes, 2 * H_kv * head_bytes, dtype)


def decode_attention_cost(
    B: int, context: int, H: int, H_kv: int, D: int, window: int, dtype: str, kv_dtype: str
) -> Cost:
    """Returns the cost of one query in each of `B` sequences with `context` keys.  A `window` of 0 means no window."""
    context = min(context, window or context)
    kv_bytes = B * context * 2 * H_kv * D * ITEM_BYTES[kv_dtype]
    block_table_bytes = B * (ceil(context / _BLOCK_TOKENS) + 1) * _LENGTH_BYTES
    return _attention(B * H * context, D, B * H * D * ITEM_BYTES[dtype], kv_bytes + block_table_bytes, dtype)


def _attention(pairs: int, head_dim: int, q_bytes: float, other_read_bytes: float, dtype: str) -> Cost:
    flops = {dtype: 4.0 * head_dim * pairs}
    return Cost(q_bytes + other_read_bytes, q_bytes, flops, 3.0 * pairs, float(pairs))


def _step(
    arch: Architecture, tokens: int, sequences: int, attention: OpCost, weight_dtype: str, kv_dtype: str, gpus: int
) -> list[OpCost]:
    """Returns the costs of all ops of one model step, with sampling, on one of `gpus` GPUs.  Only one token per
    sequence gets logits."""
    act_dtype = activation_dtype(weight_dtype)
    T, H, num_layers, D, item = tokens, arch.hidden_size, arch.num_layers, arch.head_dim, ITEM_BYTES[act_dtype]
    gpu_heads, kv_heads = arch.num_heads // gpus, max(1, arch.num_kv_heads // gpus)
    ffn_size, vocab = ceil(arch.intermediate_size / gpus), ceil(arch.vocab_size / gpus)
    q, kv_width = gpu_heads * D, kv_heads * D
    rope_bytes = T * (q + kv_width) * item
    add_norm_cost = Cost(2 * T * H * item + H * item, 2 * T * H * item, {}, 5.0 * T * H, float(T))
    rope_cost = Cost(rope_bytes + T * (D * 4 + _INDEX_BYTES), rope_bytes, {}, 3.0 * T * (q + kv_width))
    cache_cost = Cost(T * (2 * kv_width * item + _INDEX_BYTES), 2 * T * kv_width * ITEM_BYTES[kv_dtype])
    silu_cost = Cost(2 * T * ffn_size * item, T * ffn_size * item, {}, 4.0 * T * ffn_size, 2.0 * T * ffn_size)
    qk_norms = [("q_norm", gpu_heads), ("k_norm", kv_heads)] if arch.qk_norm else []

    def product(site: str, calls: int, M: int, N: int, K: int, weight: str, bias: bool = False) -> OpCost:
        return OpCost("gemm", calls, gemm_cost(M, N, K, weight, act_dtype, bias), site, {"M": M, "N": N, "K": K})

    return [
        OpCost("embedding", 1, Cost(T * _INDEX_BYTES + min(T, arch.vocab_size) * H * item, T * H * item), "embedding"),
        OpCost("rmsnorm", 1, rmsnorm_cost(T, H, item), "first_norm"),
        product("qkv_proj", num_layers, T, q + 2 * kv_width, H, weight_dtype, arch.attention_bias),
        *(OpCost("rmsnorm", num_layers, rmsnorm_cost(T * head_count, D, item), site) for site, head_count in qk_norms),
        OpCost("rope", num_layers, rope_cost, "rope"),
        OpCost("kv_cache_write", num_layers, cache_cost, "kv_cache_write"),
        attention,
        product("o_proj", num_layers, T, H, q, weight_dtype),
        OpCost("fused_add_rmsnorm", 2 * num_layers, add_norm_cost, "norms"),
        product("gate_up_proj", num_layers, T, 2 * ffn_size, H, weight_dtype),
        OpCost("silu_and_mul", num_layers, silu_cost, "silu_and_mul"),
        product("down_proj", num_layers, T, H, ffn_size, weight_dtype),
        product("lm_head", 1, sequences, vocab, H, act_dtype),
        OpCost("sample", 1, Cost(sequences * vocab * item, sequences * _INDEX_BYTES, {}, sequences * vocab), "sample"),
    ]


def step_ops(
    arch: Architecture,
    kind: StepKind,
    batch: int,
    context: int,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    gpus: int = 1,
) -> list[OpCost]:
    """Returns the ops of a step on each of `gpus` GPUs, in order.

    A `decode` step computes one new token for each of `batch` sequences. `context` counts this token too. A `prefill`
    step computes `batch` prompts of `context` tokens. Attention counts only query-key pairs that the causal mask and
    the window allow. The output head runs on the last token of each prompt.

    Raises `ValueError` on an unknown dtype, a length below 1, or a number of GPUs that does not divide the heads."""
    check_arguments(arch, weight_dtype, kv_dtype, gpus, batch=batch, context=context)
    act_dtype, shape = activation_dtype(weight_dtype), _attention_shape(arch, batch, context, gpus)
    if kind == "prefill":
        op, cost, tokens = "flash_attention", prefill_attention_cost(**shape, dtype=act_dtype), batch * context
    else:
        op, cost, tokens = "paged_attention", decode_attention_cost(**shape, dtype=act_dtype, kv_dtype=kv_dtype), batch
    attention_op = OpCost(op, arch.num_layers, cost, "attention", shape)
    return _step(arch, tokens, batch, attention_op, weight_dtype, kv_dtype, gpus)


def _attention_shape(arch: Architecture, batch: int, context: int, gpus: int) -> dict[str, int]:
    gpu_heads, kv_heads = arch.num_heads // gpus, max(1, arch.num_kv_heads // gpus)
    return {
        "B": batch,
        "context": context,
        "H": gpu_heads,
        "H_kv": kv_heads,
        "D": arch.head_dim,
        "window": arch.window or 0,
    }


def gpu_counts(arch: Architecture) -> list[int]:
    """Returns how many GPUs of a node can share the model: numbers that divide the heads and split no KV head."""
    kv_heads = arch.num_kv_heads
    return [n for n in range(1, MAX_GPUS + 1) if arch.num_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


class Link(NamedTuple):
    """The connection between the GPUs of a node."""

    name: str
    bytes_per_s: float
    """Bytes per second over the link in one direction."""
    adds: bool
    """Whether the switches of the link add the values that the GPUs send."""


def link(device: Device, gpus: int) -> Link:
    """Returns the link between `gpus` GPUs of the type `device`: NVLink if it connects all these GPUs, else PCIe."""
    if gpus <= device.nvlink_gpus and device.nvlink_bytes_per_s:
        return Link("NVLink", device.nvlink_bytes_per_s, device.nvlink_gpus > 2 and device.compute_capability >= (9, 0))
    return Link("PCIe", device.pcie_bytes_per_s, False)


def all_reduce_s(bytes_per_gpu: float, gpus: int, link: Link) -> float:
    """Returns the minimum seconds of one all-reduce of `bytes_per_gpu` bytes.  Returns 0 for one GPU."""
    traffic_factor = 1.0 if link.adds else 2 * (gpus - 1) / gpus
    return traffic_factor * bytes_per_gpu / link.bytes_per_s if gpus > 1 else 0.0


@dataclass(frozen=True)
class OpBound:
    """The minimum time of all calls of one op in a step."""

    op: str
    site: str
    calls: int
    least_ms: float
    limiter: str


@dataclass(frozen=True)
class StepBound:
    """The minimum time of a step: the sum of the times of its ops and of the all-reduces between the ops."""

    least_ms: float
    limiter: str
    """The part of the work that takes most of the time: memory, tensor, vector, sfu, launch, or link (all-reduces)."""
    all_reduce_ms: float
    ops: tuple[OpBound, ...]


def step_bound(ops: Sequence[OpCost], ceilings: Ceilings, all_reduce_total_s: float = 0.0) -> StepBound:
    """Returns the minimum time of `ops`, run one after another.  Raises `ValueError` if a dtype has no matrix rate."""
    op_bounds = [(op, bound(op.cost, ceilings)) for op in ops]
    limiter_seconds = {"link": all_reduce_total_s}
    for op, op_bound in op_bounds:
        limiter_seconds[op_bound.limiter] = limiter_seconds.get(op_bound.limiter, 0.0) + op.calls * op_bound.seconds
    return StepBound(
        least_ms=sum(limiter_seconds.values()) * 1e3,
        limiter=max(limiter_seconds, key=lambda limiter: limiter_seconds[limiter]),
        all_reduce_ms=all_reduce_total_s * 1e3,
        ops=tuple(OpBound(op.op, op.site, op.calls, op.calls * b.seconds * 1e3, b.limiter) for op, b in op_bounds),
    )


def check_arguments(arch: Architecture, weight_dtype: str, kv_dtype: str, gpus: int, **lengths: int) -> None:
    """Raises `ValueError` on an unknown dtype, an impossible number of GPUs, or a length that the model cannot have."""
    for name, dtype in (("weight_dtype", weight_dtype), ("kv_dtype", kv_dtype)):
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: expected one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
    if gpus not in gpu_counts(arch):
        valid_gpus = ", ".join(str(n) for n in gpu_counts(arch))
        raise ValueError(f"tensor_parallel: expected one of {valid_gpus} (it splits {arch.name}'s heads), got {gpus}")
    for name, length in lengths.items():
        if length < 1:
            raise ValueError(f"{name}: expected at least 1, got {length}")
        if name != "batch" and length > arch.max_position:
            raise ValueError(f"{name}: expected at most {arch.max_position} tokens ({arch.name}), got {length}")
