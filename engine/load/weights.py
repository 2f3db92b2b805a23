"""Turns a checkpoint's tensors into the model's parameters.  Each tensor must come exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rooflab.engine.load.coded import CODE_DTYPES, CodedWeight, Weight, coded, joined
from rooflab.roofline.architecture import Architecture


@dataclass
class LayerWeights:
    """Holds the weights of one decoder layer.  `qkv` packs `q`, `k` and `v`.  `gate_up` packs `gate` and `up`."""

    input_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Weight
    post_norm: torch.Tensor
    gate_up: Weight
    down: Weight


@dataclass
class Weights:
    """Holds all parameters of a model.  Matrices have the shape `[out_features, in_features]`, as in checkpoints."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    lm_head: Weight
    """The output head.  It is the same tensor as the embedding if the two are tied and have no codes."""


def parameter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns the Hugging Face name and shape of every parameter.  Leaves out an `lm_head` tied to the embedding."""
    H, D = arch.hidden_size, arch.head_dim
    q, kv, ffn_size = arch.num_heads * D, arch.num_kv_heads * D, arch.intermediate_size
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (q, H),
        "self_attn.k_proj.weight": (kv, H),
        "self_attn.v_proj.weight": (kv, H),
        "self_attn.o_proj.weight": (H, q),
        "post_attention_layernorm.weight": (H,),
        "mlp.gate_proj.weight": (ffn_size, H),
        "mlp.up_proj.weight": (ffn_size, H),
        "mlp.down_proj.weight": (H, ffn_size),
    }
    if arch.attention_bias:
        layer_shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if arch.qk_norm:
        layer_shapes |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, H), "model.norm.weight": (H,)}
    for index in range(arch.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer_shapes.items()}
    if not arch.tie_word_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, H)
    return shapes


def load_weights(
    arch: Architecture, tensors: Iterable[tuple[str, Weight]], dtype: torch.dtype, device: torch.device, codes: str = ""
) -> Weights:
    """Returns the parameters of `arch` in `dtype` on `device`.  Adds `arch.norm_offset` to the weights of norms.

    With `codes` (int8 or int4), each matrix of a linear layer is quantised when it is read.  Without, a matrix that
    the file holds in quantised form stays unchanged.  The embedding table always has `dtype`.

    Raises `ValueError` if a tensor is missing, unknown or repeated, or has a wrong shape or dtype.  Also raises it if a
    tied `lm_head` differs from the embedding."""
    shapes = parameter_shapes(arch)
    loaded_tensors: dict[str, Weight] = {}
    tied_head: torch.Tensor | None = None
    for name, tensor in tensors:
        if name == "lm_head.weight" and arch.tie_word_embeddings:
            tied_head = _values(tensor, dtype, device)
            continue
        if name not in shapes:
            raise ValueError(f"model: the checkpoint has a tensor {name!r} that {arch.name} has no place for")
        if name in loaded_tensors:
            raise ValueError(f"model: the checkpoint has the tensor {name!r} twice")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"model: expected {name} of shape {shapes[name]}, got {tuple(tensor.shape)}")
        if isinstance(tensor, torch.Tensor):
            if not tensor.dtype.is_floating_point:
                raise ValueError(f"model: expected {name} in a floating-point dtype, got {tensor.dtype}")
            if name.endswith("norm.weight"):
                tensor = tensor.float() + arch.norm_offset
        if codes in CODE_DTYPES and (name.endswith("_proj.weight") or name == "lm_head.weight"):
            loaded_tensors[name] = coded(tensor, codes)
        else:
            loaded_tensors[name] = tensor if isinstance(tensor, CodedWeight) else _values(tensor, dtype, device)
    missing = [name for name in shapes if name not in loaded_tensors]
    if missing:
        raise ValueError(f"model: the checkpoint misses {len(missing)} of {len(shapes)} tensors, first {missing[0]!r}")
    stored_embedding = loaded_tensors.pop("model.embed_tokens.weight")
    embedding = _values(stored_embedding, dtype, device)
    if tied_head is not None and not torch.equal(tied_head, embedding):
        raise ValueError("model: lm_head.weight differs from the embedding that config.json ties it to")
    layers = [packed_layer(arch, loaded_tensors, f"model.layers.{index}.") for index in range(arch.num_layers)]
    lm_head = stored_embedding if arch.tie_word_embeddings else loaded_tensors.pop("lm_head.weight")
    if codes in CODE_DTYPES and arch.tie_word_embeddings:
        lm_head = coded(lm_head, codes)
    return Weights(embedding, layers, _values(loaded_tensors.pop("model.norm.weight"), dtype, device), lm_head)


def _values(weight: Weight, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return weight.values(dtype) if isinstance(weight, CodedWeight) else weight.to(device=device, dtype=dtype)


def packed_layer(arch: Architecture, tensors: dict[str, Weight], prefix: str) -> LayerWeights:
    """Packs the tensors of one decoder layer, which have the name prefix `prefix`.  Removes them from `tensors`."""

    def take(*names: str) -> Any:
        # `pop` frees the parts, so that memory does not hold a packed copy and its parts for the whole model.
        return joined([tensors.pop(prefix + name) for name in names])

    qkv = [f"self_attn.{part_letter}_proj" for part_letter in "qkv"]
    return LayerWeights(
        input_norm=take("input_layernorm.weight"),
        qkv=take(*(f"{name}.weight" for name in qkv)),
        qkv_bias=take(*(f"{name}.bias" for name in qkv)) if arch.attention_bias else None,
        q_norm=take("self_attn.q_norm.weight") if arch.qk_norm else None,
        k_norm=take("self_attn.k_norm.weight") if arch.qk_norm else None,
        o=take("self_attn.o_proj.weight"),
        post_norm=take("post_attention_layernorm.weight"),
        gate_up=take("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=take("mlp.down_proj.weight"),
    )


def dummy_tensors(
    arch: Architecture, seed: int = 0, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields random parameters of the right shapes.  Norms multiply by 1, and matrices have variance `1 / in_features`.

    The numbers are drawn on `device`: a CPU takes minutes for 8 billion of them.  Other devices draw other numbers."""
    for index, (name, shape) in enumerate(parameter_shapes(arch).items()):
        if len(shape) == 1 and name.endswith("norm.weight"):
            yield name, torch.full(shape, 1.0 - arch.norm_offset)
        else:
            generator = torch.Generator(device).manual_seed(seed + index)
            yield name, torch.randn(shape, generator=generator, device=device).mul_(shape[-1] ** -0.5)
