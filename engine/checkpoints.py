"""Reading a model from disk: its architecture, and its tensors by their Hugging Face names, one at a time.

GGUF stores the q and k rows of `llama` models permuted for interleaved rotation, and Gemma's norms with 1 added. This
file puts them back, so that the other files know only one form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from rooflab.engine.model_files import check_model
from rooflab.roofline.architecture import Architecture

_GGUF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_GGUF_FACTORS = "rope_freqs.weight"
"""What divides each frequency: llama.cpp's converter works it out of Llama 3's rope scaling."""
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Checkpoint(Protocol):
    """A model on disk."""

    architecture: Architecture
    path: Path

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its Hugging Face name, in fp32 or the checkpoint's float dtype."""


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file or a Hugging Face folder with safetensors.

    Raises `ValueError` if it is neither, or is damaged, or has an unknown architecture.
    """
    check_model(str(path))
    return GGUFCheckpoint(path) if path.is_file() else SafetensorsCheckpoint(path)


class GGUFCheckpoint:
    """One GGUF file; the `gguf` package dequantises each tensor."""

    def __init__(self, path: Path):
        from gguf import GGUFReader  # a GPU machine that measures kernels may lack the package

        self.path = path
        try:
            self._reader = GGUFReader(str(path))
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ValueError(f"model: {path.name} is not a whole GGUF file: {error}") from error
        size = path.stat().st_size
        for tensor in self._reader.tensors:
            if int(tensor.data_offset) + int(tensor.n_bytes) > size:
                raise ValueError(f"model: {path.name} is cut short: tensor {tensor.name} lies beyond its {size} bytes")
        self._kind: str = self._field("general.architecture")
        self.architecture = Architecture.from_config(self._config(), name=path.stem)

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def _config(self) -> dict[str, Any]:
        def get(name: str, default: Any = None) -> Any:
            return self._field(f"{self._kind}.{name}", default)

        hidden, heads = get("embedding_length"), get("attention.head_count")
        names = {tensor.name for tensor in self._reader.tensors}
        embedding = next((tensor for tensor in self._reader.tensors if tensor.name == "token_embd.weight"), None)
        if not hidden or not heads or embedding is None:
            raise ValueError(f"model: {self.path.name} names no embedding_length, head_count or token_embd.weight")
        window = get("attention.sliding_window")
        return {
            "model_type": "mistral" if self._kind == "llama" and window else self._kind,
            "sliding_window": window,
            "rope_scaling": self._rope_scaling(),
            "hidden_size": hidden,
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length", hidden // heads),
            "vocab_size": int(embedding.shape[1]),
            "max_position_embeddings": get("context_length"),
            "rope_theta": get("rope.freq_base", 10000.0),
            "rms_norm_eps": round(float(get("attention.layer_norm_rms_epsilon")), 12),  # stored as fp32: 9.99e-06
            "tie_word_embeddings": "output.weight" not in names,
            "attention_bias": "blk.0.attn_q.bias" in names,
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        prefix = f"{self._kind}.rope.scaling."
        found = {
            name.removeprefix(prefix): self._field(name) for name in self._reader.fields if name.startswith(prefix)
        }
        kind = found.pop("type", "none")
        found.pop("finetuned", None)
        factors = next((tensor for tensor in self._reader.tensors if tensor.name == _GGUF_FACTORS), None)
        if kind in ("none", None):
            return None if factors is None else {"rope_type": "factors", "factors": factors.data.tolist()}
        if factors is not None:
            raise ValueError(f"model: {self.path.name} has both {_GGUF_FACTORS} and rope scaling {kind}")
        length = found.pop("original_context_length", None)
        if kind == "yarn" and length:
            found["original_max_position_embeddings"] = length
        return {"rope_type": kind, **found}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, dequantised to fp32."""
        from gguf import quants

        arch = self.architecture
        for tensor in self._reader.tensors:
            if tensor.name == _GGUF_FACTORS:
                continue
            name = _gguf_name(tensor.name)
            try:
                values = np.ascontiguousarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            except (NotImplementedError, ValueError) as error:
                raise ValueError(f"model: cannot dequantise {tensor.name}: {error}") from error
            if self._kind == "llama" and (".q_proj." in name or ".k_proj." in name):
                heads = arch.num_heads if ".q_proj." in name else arch.num_kv_heads
                values = _half_split(values, heads)
            if self._kind == "gemma" and name.endswith("norm.weight"):
                values = values - 1
            yield name, torch.from_numpy(values.copy() if not values.flags.writeable else values)


def _gguf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        if rest in _GGUF_LAYER:
            return f"model.layers.{layer}.{_GGUF_LAYER[rest]}"
    return name  # unknown: the loader refuses it by this name


def _half_split(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's order: row (pair, half) of each head becomes row (half, pair)."""
    pairs = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


class SafetensorsCheckpoint:
    """A Hugging Face folder: config.json and one or more safetensors files."""

    def __init__(self, path: Path):
        self.path = path
        self.architecture = Architecture.from_config(path, name=path.absolute().name)
        quantised = json.loads((path / "config.json").read_text()).get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise ValueError(f"model: quantization_config ({method}) is not implemented; expected plain weights")
        # Standard names, sharded or single; other files (`consolidated.safetensors`) hold the same tensors again.
        self._files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
        if not self._files:
            raise ValueError(f"model: {path} has a config.json but no *.safetensors")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in its stored dtype."""
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():
                        yield name, handle.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"model: {file.name} is not a whole safetensors file: {error}") from error
