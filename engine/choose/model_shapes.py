"""Lists the ops that a model uses and the sizes of their inputs, and makes these inputs as meta or random tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rooflab.engine.load.coded import GROUP
from rooflab.roofline.architecture import Architecture

MODEL_OPS = (
    "embedding",
    "rmsnorm",
    "fused_add_rmsnorm",
    "gemm",
    "rope_and_cache",
    "flash_attention_varlen",
    "paged_attention",
    "silu_and_mul",
    "sample",
)
DECODE_OP = "decode_attention"
"""The op `paged_attention` with one query per sequence.  Some kernels can serve only this case."""
FUSED_OP = "gemm_silu_and_mul"
"""The op that replaces `gemm` and `silu_and_mul` on CUDA, if a record of the card prefers it."""
MATMUL_OPS = ("gemm", "gemm_gguf")
"""The ops that multiply by a weight: in the model's dtype, and by codes.  The model calls both `gemm`."""
MOST_REPLAYED = 16
"""The most sequences of a replayed decode step on a CPU.  In larger steps the host's share is small."""
CONTEXT_LENGTH = 512
"""The number of keys of each sequence in the timed calls."""


@dataclass(frozen=True)
class LargestSizes:
    """Holds the largest sizes of the model's inputs.  A kernel must accept these sizes."""

    arch: Architecture
    device: torch.device
    dtype: torch.dtype
    block_size: int
    max_model_len: int
    max_rows: int
    """The most rows of a step, including the rows of prompts."""
    sequences: int
    """The most sequences of a step."""
    max_drawn: int
    """The most rows of logits in a step: one row per sequence, and one row for each of its drafted tokens."""
    codes: str = ""
    """The option `dtype` if weights are codes: `int8`, `int4` or `keep` (as in the file).  Empty for plain weights."""
    plain: bool = False
    """Whether some weights of products have the model's dtype although the others are codes."""

    @property
    def matmul_ops(self) -> tuple[str, ...]:
        """Returns the ops that multiply by weights."""
        return MATMUL_OPS[1:] + MATMUL_OPS[:1] * self.plain if self.codes else MATMUL_OPS[:1]

    @property
    def ops(self) -> tuple[str, ...]:
        """Returns the names of the model's ops. `decode_attention` is `paged_attention` with one query per sequence."""
        op_names = {"gemm": self.matmul_ops, "silu_and_mul": (gated(self.arch),)}
        return (*(name for op in MODEL_OPS for name in op_names.get(op, (op,))), DECODE_OP)

    @property
    def fused(self) -> tuple[str, ...]:
        """Returns the names of the ops that may replace two other ops."""
        return () if self.codes or self.arch.activation != "silu" else (FUSED_OP,)


def gated(arch: Architecture) -> str:
    """Returns the name of the op between the two matmuls of a model's MLP."""
    return "silu_and_mul" if arch.activation == "silu" else "gelu_and_mul"


def registered(op: str) -> str:
    """Returns the name of an op in the kernel registry. Only `decode_attention` has another name: `paged_attention`."""
    return "paged_attention" if op == DECODE_OP else op


def model_inputs(op: str, M: int, limits: LargestSizes) -> list[dict[str, Any]]:
    """Returns the arguments that the model passes to `op` in a step of `M` rows, as meta tensors."""
    if op in MATMUL_OPS:
        return _product_inputs(op, M, limits)
    arch, block_size = limits.arch, limits.block_size
    meta = partial(torch.empty, dtype=limits.dtype, device="meta")
    H, D, query_heads, kv_heads = arch.hidden_size, arch.head_dim, arch.num_heads, arch.num_kv_heads
    num_logit_rows = min(M, limits.max_drawn)
    max_blocks = -(-limits.max_model_len // block_size)
    cache = meta(max_blocks, block_size, kv_heads, D)
    q, k = meta(M, query_heads, D), meta(M, kv_heads, D)
    token_ids = meta(M, dtype=torch.int64)
    attention_options = {"softmax_scale": None} | ({} if arch.window is None else {"window": arch.window})
    chunk_bounds = torch.tensor([0, M], dtype=torch.int32)  # of one chunk
    lengths = {"cu_seqlens_q": chunk_bounds, "cu_seqlens_k": chunk_bounds, "max_seqlen_q": M, "max_seqlen_k": M}
    rope_table = meta(limits.max_model_len, D // 2, dtype=torch.float32)
    fp32_options, pages = {"dtype": torch.float32}, {"q": q, "k_cache": cache, "v_cache": cache, **attention_options}
    arguments: dict[str, dict[str, Any]] = {
        "embedding": {"token_ids": token_ids, "weight": meta(arch.vocab_size, H)},
        "rmsnorm": {"x": meta(M, H), "weight": meta(H), "eps": arch.rms_norm_eps},
        "fused_add_rmsnorm": {"x": meta(M, H), "residual": meta(M, H), "weight": meta(H), "eps": arch.rms_norm_eps},
        "rope_and_cache": {
            **{"q": q, "k": k, "v": k, "q_out": q, "k_cache": cache, "v_cache": cache},
            **{"cos": rope_table, "sin": rope_table, "positions": token_ids, "slot_mapping": token_ids},
            **(dict.fromkeys(("q_norm", "k_norm"), meta(D)) if arch.qk_norm else {}),
        },
        "flash_attention_varlen": {"q": q, "k": k, "v": k, **lengths, "causal": True, **attention_options},
        "decode_attention": pages | _paged(M, max_blocks),
        "paged_attention": pages | _paged(1, max_blocks) | {"cu_seqlens_q": chunk_bounds},
        FUSED_OP: {"a": meta(M, H), "b": meta(2 * arch.intermediate_size, H).mT},
        gated(arch): {"x": meta(M, 2 * arch.intermediate_size)},
        "sample": {
            "logits": meta(num_logit_rows, arch.vocab_size),
            "temperature": meta(num_logit_rows, **fp32_options),
            "top_k": meta(num_logit_rows, dtype=torch.int32),
            "top_p": meta(num_logit_rows, **fp32_options),
            "min_p": meta(num_logit_rows, **fp32_options),
            "seed": meta(num_logit_rows, dtype=torch.int64),
            "position": meta(num_logit_rows, dtype=torch.int64),
        },
    }
    return [arguments[op]]


def _paged(sequences: int, max_blocks: int) -> dict[str, torch.Tensor]:
    """Returns the int32 tensors `block_table` `[sequences, max_blocks]`, all 0, and `seq_lens` `[sequences]`, all 1."""
    block_table = torch.zeros(sequences, max_blocks, dtype=torch.int32)
    return {"block_table": block_table, "seq_lens": torch.ones(sequences, dtype=torch.int32)}


def _product_inputs(op: str, M: int, limits: LargestSizes) -> list[dict[str, Any]]:
    """Returns the arguments of a layer's four matmuls, and of the output head's matmul."""
    arch = limits.arch
    H, D, intermediate_size = arch.hidden_size, arch.head_dim, arch.intermediate_size
    qkv_size = (arch.num_heads + 2 * arch.num_kv_heads) * D
    shapes = ((M, qkv_size, H), (M, H, arch.num_heads * D), (M, 2 * intermediate_size, H), (M, H, intermediate_size))
    meta = partial(torch.empty, dtype=limits.dtype, device="meta")

    def weight(N: int, K: int) -> dict[str, Any]:
        if op == "gemm":
            return {"b": meta(N, K).mT}
        scale = meta(N, K // GROUP, dtype=torch.float16)
        if limits.codes == "int8":
            return {"b": meta(N, K, dtype=torch.int8), "scale": scale, "minimum": None}
        return {"b": meta(N, K // 2, dtype=torch.uint8), "scale": scale, "minimum": scale}

    inputs: list[dict[str, Any]] = [
        {"a": meta(rows, K), **weight(N, K), "bias": None}
        for rows, N, K in (*shapes, (min(M, limits.max_drawn), arch.vocab_size, H))
    ]
    inputs[0]["bias"] = meta(qkv_size) if arch.attention_bias else None
    return inputs


def real(inputs: Mapping[str, Any], block_size: int, context: int = CONTEXT_LENGTH) -> dict[str, Any]:
    """Makes real (random) tensors from meta tensors.  Pages and positions are valid; a sequence has `context` keys."""
    arguments: dict[str, Any] = {}
    sequences = len(inputs["seq_lens"]) if "seq_lens" in inputs else 1
    rows = len(inputs["q"]) if "q" in inputs else 1
    sequence_length = context if sequences == rows else context + rows
    pages = -(-max(sequence_length, rows) // block_size)
    for input_name, input_value in inputs.items():
        if input_name == "block_table":
            arguments[input_name] = torch.randperm(sequences * pages, dtype=torch.int32).view(sequences, pages)
        elif input_name == "seq_lens":
            arguments[input_name] = torch.full((sequences,), sequence_length, dtype=torch.int32)
        elif input_name in ("k_cache", "v_cache"):
            arguments[input_name] = torch.randn(sequences * pages, *input_value.shape[1:]).to(input_value.dtype)
        elif input_name == "positions":
            arguments[input_name] = torch.arange(len(input_value)) % len(inputs["cos"])
        elif isinstance(input_value, torch.Tensor) and input_value.is_meta:
            arguments[input_name] = _filled(input_name, input_value)
        else:
            arguments[input_name] = input_value
    return arguments


def _filled(name: str, like: torch.Tensor) -> torch.Tensor:
    if not like.is_contiguous():  # a transposed weight
        return _filled(name, like.mT).mT
    if name == "slot_mapping":
        return torch.arange(len(like))
    if name == "token_ids" or not like.dtype.is_floating_point:
        return torch.zeros(like.shape, dtype=like.dtype)
    if name in ("temperature", "top_p", "min_p"):  # greedy
        return torch.full(like.shape, float(name == "top_p"))
    return torch.randn(like.shape).to(like.dtype)


def packed(way: Callable[..., Any] | None, b: torch.Tensor, **beside: torch.Tensor | None) -> Any:
    """Packs the weight `b` with the function `way`, a kernel's `prepare`. If `way` is None, returns `b` unchanged.
    `beside` has other tensors that `way` needs, such as scales."""
    if way is None:
        return b
    return way(b, *(beside[name] for name in list(inspect.signature(way).parameters)[1:]))
