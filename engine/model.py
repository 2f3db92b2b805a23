"""Runs a Llama-family decoder on a flat batch of tokens and a paged KV cache, with the kernels of an `OpSet`."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from rooflab.engine.choose.model_shapes import FUSED_OP, gated
from rooflab.engine.load.weights import Weights
from rooflab.engine.ops import OpSet
from rooflab.reference.llama import rotation
from rooflab.roofline.architecture import Architecture


@dataclass(frozen=True, slots=True)
class KVCache:
    """Holds the keys and the values of each layer: tensors `[num_blocks, block_size, num_kv_heads, head_dim]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Describes the chunks of prompts in a step.  Their tokens come after the decoding tokens, chunk by chunk."""

    cu_seqlens: torch.Tensor
    """(num_chunks + 1,) int32: where each chunk begins among the chunks' tokens, and where the last chunk ends."""
    longest: int
    """The number of tokens of the longest chunk."""
    history: tuple[torch.Tensor, torch.Tensor] | None
    """`block_table` (num_chunks, max_blocks) and `seq_lens` (num_chunks,), both int32, for all tokens up to the end of
    each chunk.  None if all chunks begin at position 0, so that attention needs no earlier keys from the cache."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """Holds the tensors of a step over `T` tokens: one token of each decoding sequence, then the chunks of prompts."""

    token_ids: torch.Tensor
    """int64, shape (T,)."""
    positions: torch.Tensor
    """int64, shape (T,)."""
    slot_mapping: torch.Tensor
    """(T,) int64: the cache slot of each token's key and value."""
    block_table: torch.Tensor
    """(num_decodes, max_blocks) int32: the pages of each decoding sequence."""
    seq_lens: torch.Tensor
    """(num_decodes,) int32: the number of tokens, including the token that the step computes."""
    chunks: Chunks | None = None
    drawn: torch.Tensor | None = None
    """(num_drawn,) int64: the indices of the tokens whose next token is drawn.  None means all tokens."""


class Model:
    """Holds the model: embedding, decoder layers, norm and output head.  `forward` returns the logits of a step."""

    def __init__(self, arch: Architecture, weights: Weights, ops: OpSet, max_model_len: int):
        self.arch = arch
        # Rounded as transformers rounds it.
        self.embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=weights.embedding.dtype))
        self.embedding = weights.embedding
        if self.embedding_scale != 1 and self.embedding.device.type == "cpu":  # a step then has no torch op
            self.embedding, self.embedding_scale = weights.embedding * self.embedding_scale, 1.0
        self.norm = weights.norm
        self.cos, self.sin = (rope_table.to(weights.embedding.device) for rope_table in rotation(arch, max_model_len))
        self._window = {} if arch.window is None else {"window": arch.window}
        self.layers = []
        while weights.layers:
            layer = weights.layers.pop(0)
            # One layer is packed at a time, so that memory never holds two copies of the whole model.
            packed_projections = {name: ops.prepare(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")}
            vector_weights = {name: getattr(layer, name) for name in ("input_norm", "qkv_bias", "post_norm")}
            qk_norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "norm_eps": arch.rms_norm_eps}
            qk_norms = {} if layer.q_norm is None else qk_norms
            self.layers.append(SimpleNamespace(**packed_projections, **vector_weights, norms=qk_norms))
        self.lm_head = ops.prepare(weights.lm_head)

    def forward(self, step: StepInput, cache: KVCache, ops: Any) -> torch.Tensor:
        """Returns logits `[num_drawn, vocab_size]`, one row for each token to draw."""
        logits: torch.Tensor = ops.gemm(self.hidden(step, cache, ops), self.lm_head)
        return logits

    def hidden(self, step: StepInput, cache: KVCache, ops: Any) -> torch.Tensor:
        """Returns hidden states `[num_drawn, hidden_size]` after the last norm, one row for each token to draw."""
        eps = self.arch.rms_norm_eps
        x = ops.embedding(step.token_ids, self.embedding)  # (T, H)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        residual = x
        for layer_index, layer in enumerate(self.layers):
            if layer_index == 0:
                x = ops.rmsnorm(x, layer.input_norm, eps)
            else:
                x, residual = ops.fused_add_rmsnorm(x, residual, layer.input_norm, eps)
            x = self.attention(x, layer, step, cache.keys[layer_index], cache.values[layer_index], ops)
            if step.drawn is not None and layer_index == len(self.layers) - 1:
                x, residual = x[step.drawn], residual[step.drawn]  # nobody needs the other tokens any more
            x = ops.gemm(x, layer.o)
            x, residual = ops.fused_add_rmsnorm(x, residual, layer.post_norm, eps)
            x = ops.gemm(self.gated(x, layer.gate_up, ops), layer.down)
        hidden: torch.Tensor = ops.fused_add_rmsnorm(x, residual, self.norm, eps)[0]
        return hidden

    def gated(self, x: torch.Tensor, gate_up: Any, ops: Any) -> torch.Tensor:
        """Computes `activation(gate) * up` `[T, intermediate_size]` from `x` and the packed projection `gate_up`."""
        kernel = getattr(ops, FUSED_OP, None)
        output: torch.Tensor = kernel(x, gate_up) if kernel else getattr(ops, gated(self.arch))(ops.gemm(x, gate_up))
        return output

    def attention(
        self, x: torch.Tensor, layer: Any, step: StepInput, k_cache: torch.Tensor, v_cache: torch.Tensor, ops: Any
    ) -> torch.Tensor:
        """Computes attention `[T, num_heads * head_dim]` of `x` `[T, H]`.  Writes the keys and values to the cache."""
        arch = self.arch
        T, D = x.shape[0], arch.head_dim
        qkv = ops.gemm(x, layer.qkv, layer.qkv_bias).view(T, -1, D)  # (T, H + 2 H_kv, D)
        input_q, k, v = qkv.split((arch.num_heads, arch.num_kv_heads, arch.num_kv_heads), dim=1)
        q = torch.empty(input_q.shape, dtype=input_q.dtype, device=input_q.device)
        slots = step.slot_mapping
        ops.rope_and_cache(input_q, k, v, self.cos, self.sin, step.positions, q, k_cache, v_cache, slots, **layer.norms)
        outputs = []
        n = len(step.seq_lens)
        if n:
            pages = (k_cache, v_cache, step.block_table, step.seq_lens)
            outputs.append(ops.decode_attention(q[:n], *pages, **self._window))
        if (chunks := step.chunks) is not None:
            cu_seqlens, longest_chunk = chunks.cu_seqlens, chunks.longest
            if chunks.history is None:
                rotated_keys = k_cache.flatten(0, 1)[step.slot_mapping[n:]]
                chunk_args = (q[n:], rotated_keys, v[n:], cu_seqlens, cu_seqlens, longest_chunk, longest_chunk)
                outputs.append(ops.flash_attention_varlen(*chunk_args, causal=True, **self._window))
            else:
                pages = (k_cache, v_cache, *chunks.history)
                outputs.append(ops.paged_attention(q[n:], *pages, cu_seqlens_q=cu_seqlens, **self._window))
        attention_output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attention_output.reshape(T, -1)
