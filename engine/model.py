"""A Llama-family decoder over flat tokens and a paged KV cache.  All maths goes through an OpSet."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from rooflab.engine.ops import OpSet
from rooflab.engine.weights import Weights
from rooflab.reference.llama import rotation
from rooflab.roofline.architecture import Architecture


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer, keys and values (num_blocks, block_size, num_kv_heads, head_dim)."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tensors of one step over T tokens."""

    token_ids: torch.Tensor
    """(T,) int64."""
    positions: torch.Tensor
    """(T,) int64."""
    slot_mapping: torch.Tensor
    """(T,) int64: the cache slot of each token's key and value."""
    prompt_ends: tuple[int, ...] | None = None
    """In prefill, the end of each prompt in the flat tokens; None in decode."""
    block_table: torch.Tensor | None = None
    """In decode, (T, max_blocks) int32."""
    seq_lens: torch.Tensor | None = None
    """In decode, (T,) int32."""


class Model:
    """Embedding, decoder layers, norm and head.  `forward` returns the logits of the positions that are sampled."""

    def __init__(self, arch: Architecture, weights: Weights, ops: OpSet, max_model_len: int):
        self.arch = arch
        self.embedding = weights.embedding
        self.norm = weights.norm
        self.cos, self.sin = (table.to(weights.embedding.device) for table in rotation(arch, max_model_len))
        # Rounded as transformers rounds it.
        self.embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=weights.embedding.dtype))
        self._window = {} if arch.window is None else {"window": arch.window}
        self.layers = []
        while weights.layers:
            layer = weights.layers.pop(0)
            # One layer is packed at a time, so that memory never holds two copies of the whole model.
            projections = {name: ops.prepare(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")}
            vectors = {
                name: getattr(layer, name) for name in ("input_norm", "qkv_bias", "q_norm", "k_norm", "post_norm")
            }
            self.layers.append(SimpleNamespace(**projections, **vectors))
        self.lm_head = ops.prepare(weights.lm_head)

    def forward(self, step: StepInput, cache: KVCache, ops: Any) -> torch.Tensor:
        """Logits (num_sequences, vocab_size) of each prompt's last token in prefill, or of every token in decode."""
        eps = self.arch.rms_norm_eps
        x = ops.embedding(step.token_ids, self.embedding)  # (T, H)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        residual = x
        for index, layer in enumerate(self.layers):
            if index == 0:
                x = ops.rmsnorm(x, layer.input_norm, eps)
            else:
                x, residual = ops.fused_add_rmsnorm(x, residual, layer.input_norm, eps)
            x = self._attention(x, layer, step, cache.keys[index], cache.values[index], ops)
            x, residual = ops.fused_add_rmsnorm(x, residual, layer.post_norm, eps)
            gate_up = ops.gemm(x, layer.gate_up)
            active = ops.silu_and_mul(gate_up) if self.arch.activation == "silu" else gelu_and_mul(gate_up)
            x = ops.gemm(active, layer.down)
        if step.prompt_ends is not None:
            last = torch.tensor(step.prompt_ends, device=x.device) - 1
            x, residual = x[last], residual[last]
        x, _ = ops.fused_add_rmsnorm(x, residual, self.norm, eps)
        logits: torch.Tensor = ops.gemm(x, self.lm_head)
        return logits

    def _attention(
        self, x: torch.Tensor, layer: Any, step: StepInput, k_cache: torch.Tensor, v_cache: torch.Tensor, ops: Any
    ) -> torch.Tensor:
        arch = self.arch
        T, D = x.shape[0], arch.head_dim
        qkv = ops.gemm(x, layer.qkv, layer.qkv_bias).view(T, -1, D)  # (T, H + 2 H_kv, D)
        q, k, v = qkv.split((arch.num_heads, arch.num_kv_heads, arch.num_kv_heads), dim=1)
        if layer.q_norm is not None:
            q = ops.rmsnorm(q.reshape(-1, D), layer.q_norm, arch.rms_norm_eps).view(q.shape)
            k = ops.rmsnorm(k.reshape(-1, D), layer.k_norm, arch.rms_norm_eps).view(k.shape)
        q, k = ops.rope(q, k, self.cos, self.sin, step.positions)
        ops.kv_cache_write(k, v, k_cache, v_cache, step.slot_mapping)
        if step.prompt_ends is None:
            out = ops.paged_attention(q, k_cache, v_cache, step.block_table, step.seq_lens, **self._window)
        else:
            parts, start = [], 0
            for end in step.prompt_ends:
                q_, k_, v_ = (tensor[None, start:end] for tensor in (q, k, v))
                parts.append(ops.flash_attention(q_, k_, v_, True, **self._window)[0])
                start = end
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        projected: torch.Tensor = ops.gemm(out.reshape(T, -1), layer.o)
        return projected


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """GELU (its tanh approximation) of the first half of the columns, times the second half: Gemma's GeGLU."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
