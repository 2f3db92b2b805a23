"""Computes a whole model of the Llama family, from prompt to token, in plain torch and fp32 without a KV cache.

The tests compare the engine with this short file. The model is LLaMA (Touvron et al., 2023): RMSNorm (Zhang and
Sennrich, 2019), rotary positions (Su et al., "RoFormer", 2021), grouped-query attention (Ainslie et al., 2023) and
SwiGLU (Shazeer, 2020). The differences of Mistral, Qwen and Gemma are options. T: tokens, H: hidden size, D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from rooflab.roofline.architecture import Architecture

Tensors = Mapping[str, Tensor]
"""Parameters by their Hugging Face names; matrices are (out_features, in_features)."""


def generate(arch: Architecture, tensors: Tensors, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Returns the next `new_tokens` tokens by greedy decoding: always the most likely token."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(logits(arch, tensors, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def logits(arch: Architecture, tensors: Tensors, tokens: Sequence[int]) -> Tensor:
    """Returns the logits of the next token after each of the T tokens, (T, vocabulary)."""
    embedding = tensors["model.embed_tokens.weight"].float()
    x = embedding[torch.tensor(tokens)] * arch.embedding_scale  # (T, H)
    cos, sin = rotation(arch, len(tokens))
    for layer_index in range(arch.num_layers):
        prefix = f"model.layers.{layer_index}."
        layer = {name.removeprefix(prefix): value.float() for name, value in tensors.items() if name.startswith(prefix)}
        x = x + attention(arch, layer, norm(arch, x, layer["input_layernorm.weight"]), cos, sin)
        x = x + mlp(arch, layer, norm(arch, x, layer["post_attention_layernorm.weight"]))
    x = norm(arch, x, tensors["model.norm.weight"].float())
    return linear(x, embedding if arch.tie_word_embeddings else tensors["lm_head.weight"].float())


def norm(arch: Architecture, x: Tensor, weight: Tensor) -> Tensor:
    """Returns x divided by the root mean square of its last dimension, then multiplied by `weight`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + arch.rms_norm_eps) * (weight + arch.norm_offset)


def mlp(arch: Architecture, layer: Tensors, x: Tensor) -> Tensor:
    """Computes the gated MLP of one layer: (T, H) to (T, H)."""
    gate, up = linear(x, layer["mlp.gate_proj.weight"]), linear(x, layer["mlp.up_proj.weight"])
    activated_gate = silu(gate) if arch.activation == "silu" else gelu(gate, approximate="tanh")
    return linear(activated_gate * up, layer["mlp.down_proj.weight"])


def attention(arch: Architecture, layer: Tensors, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computes the attention of one layer: (T, H) to (T, H). A query sees keys up to its position, in the window."""
    T, D = len(x), arch.head_dim

    def heads(name: str) -> Tensor:
        bias = layer.get(f"self_attn.{name}_proj.bias")
        return linear(x, layer[f"self_attn.{name}_proj.weight"], bias).view(T, -1, D).transpose(0, 1)  # (heads, T, D)

    q, k, v = heads("q"), heads("k"), heads("v")
    if arch.qk_norm:
        q, k = norm(arch, q, layer["self_attn.q_norm.weight"]), norm(arch, k, layer["self_attn.k_norm.weight"])
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (kv_tensor.repeat_interleave(arch.num_heads // arch.num_kv_heads, dim=0) for kv_tensor in (k, v))
    key_age = torch.arange(T)[:, None] - torch.arange(T)  # how far a key lies behind the query
    unseen_mask = (key_age < 0) | (key_age >= (arch.window or T))
    weights = (q @ k.mT / math.sqrt(D)).masked_fill(unseen_mask, -math.inf).softmax(dim=-1)  # (heads, T, T)
    return linear((weights @ v).transpose(0, 1).reshape(T, -1), layer["self_attn.o_proj.weight"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + D/2]) of a head by the rotary angle of the token and the pair."""
    left_columns, right_columns = x.chunk(2, dim=-1)
    return torch.cat([left_columns * cos - right_columns * sin, right_columns * cos + left_columns * sin], dim=-1)


def rotation(arch: Architecture, T: int) -> tuple[Tensor, Tensor]:
    """Returns the cos and sin (T, D / 2) of the rotary angles position * frequency.

    The model's configuration names the method that scales the frequencies: `linear` (Chen et al., 2023), `llama3`
    (Meta's reference for Llama 3.1), `yarn` (Peng et al., 2023), or `factors` (divisors from a GGUF file)."""
    D, rope_scaling = arch.head_dim, arch.rope_scaling or {"rope_type": "default", "factor": 1.0}
    pair_columns = torch.arange(0, D, 2, dtype=torch.float64)
    freqs = arch.rope_theta ** (-pair_columns / D)
    rope_type, magnitude_factor = rope_scaling["rope_type"], 1.0
    slowed_freqs = freqs / torch.tensor(
        rope_scaling["factors" if rope_type == "factors" else "factor"], dtype=torch.float64
    )
    if rope_type in ("default", "linear", "factors"):
        freq_weights = torch.zeros_like(freqs)
    elif rope_type == "llama3":
        turns = freqs * rope_scaling["original_max_position_embeddings"] / math.tau
        min_turns, max_turns = rope_scaling["low_freq_factor"], rope_scaling["high_freq_factor"]
        freq_weights = ((turns - min_turns) / (max_turns - min_turns)).clamp(0, 1)
    else:
        training_length = rope_scaling.get("original_max_position_embeddings") or arch.max_position

        def pair_of(turns: float) -> float:
            """Returns the index (not rounded) of the column pair that rotates `turns` times in the training length."""
            return D * math.log(training_length / (turns * math.tau)) / (2 * math.log(arch.rope_theta))

        first_pair = max(math.floor(pair_of(rope_scaling.get("beta_fast") or 32)), 0)
        last_pair = min(math.ceil(pair_of(rope_scaling.get("beta_slow") or 1)), D - 1)
        freq_weights = 1 - ((pair_columns / 2 - first_pair) / max(last_pair - first_pair, 1e-3)).clamp(0, 1)
        magnitude_factor = rope_scaling.get("attention_factor") or max(0.1 * math.log(rope_scaling["factor"]) + 1, 1.0)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * (freq_weights * freqs + (1 - freq_weights) * slowed_freqs)
    return (angles.cos() * magnitude_factor).float(), (angles.sin() * magnitude_factor).float()
