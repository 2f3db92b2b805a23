"""Reads the description of a model from the header of a GGUF file.  Refuses a model with an unsupported key."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from rooflab.engine.load.gguf_file import read_gguf
from rooflab.roofline.architecture import Architecture

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma")
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that divides the rotary frequencies.  llama.cpp's converter makes it from Llama 3's rope scaling."""
_RISKY_KEY_REGEX = re.compile("rope|attention|scal|softcap|window|expert|parallel|pooling")
_SUPPORTED_KEYS = frozenset(
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length attention.causal"
    " attention.layer_norm_rms_epsilon attention.sliding_window rope.dimension_count rope.freq_base"
    " rope.scaling.finetuned rope.scaling.original_context_length".split()
)
_NEUTRAL_VALUES = {"rope.scaling.type": ("none", "linear"), "rope.scaling.factor": (1.0,), "rope.scale_linear": (1.0,)}
"""For some keys, the values that change nothing.  The value 0 and empty values change nothing either."""


class GGUFModel:
    """Describes the model in a GGUF file.  `fields` maps keys to values, and `tensors` maps ggml's names to tensors.

    Raises `ValueError` on a damaged or split file, a wrong value, or an unsupported key that may change an answer."""

    def __init__(self, path: Path):
        self.path = path
        file = read_gguf(path)
        self.fields, self.tensors = file.fields, file.tensors
        self.kind = self.fields.get("general.architecture")
        if self.kind not in GGUF_ARCHITECTURES:
            arch_names = ", ".join(GGUF_ARCHITECTURES)
            raise ValueError(f"model: expected general.architecture to be one of {arch_names}, got {self.kind!r}")
        if (count := self._whole("split.count", 1)) > 1:
            merge_advice = "join them by `llama-gguf-split --merge`"
            raise ValueError(f"model: expected one file, got {path.name}, one of split.count {count}; {merge_advice}")
        self._refuse_unmodelled()
        self.architecture = Architecture.from_config(self._config(), name=path.stem)

    def _refuse_unmodelled(self) -> None:
        for name, value in self.fields.items():
            key_suffix = name.removeprefix(f"{self.kind}.")
            if key_suffix == name or key_suffix in _SUPPORTED_KEYS or value in _NEUTRAL_VALUES.get(key_suffix, ()):
                continue
            if _RISKY_KEY_REGEX.search(key_suffix) and value:
                raise ValueError(f"model: {self.path.name}: {name} {value!r} is not modelled yet")

    def _whole(self, name: str, default: int | None = None) -> int:
        """Returns the integer of the key `name` in the GGUF header, or `default` if the key is missing.  Raises
        `ValueError` if the result is not a whole number in [0, 2**31)."""
        value = self.fields.get(name, default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise ValueError(f"model: {self.path.name}: expected a whole number below 2**31 as {name}, got {value!r}")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        """Returns the number of the key `name` in the GGUF header, or `default` if the key is missing.  Raises
        `ValueError` if the result is not a finite number above 0."""
        value: Any = self.fields.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"model: {self.path.name}: expected a finite number above 0 as {name}, got {value!r}")
        return float(value)

    def _config(self) -> dict[str, Any]:
        """Returns the model's settings in the format of a Hugging Face config.json."""
        key = f"{self.kind}."
        hidden_size, num_heads = self._whole(f"{key}embedding_length"), self._whole(f"{key}attention.head_count")
        embedding, rope_factors = self.tensors.get("token_embd.weight"), self.tensors.get(ROPE_FACTORS)
        if not num_heads or embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"model: {self.path.name} has no {key}attention.head_count or no matrix token_embd.weight")
        head_dim = self._whole(f"{key}attention.key_length", hidden_size // num_heads)
        window_size = self._whole(f"{key}attention.sliding_window", 0)
        fixed_values = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "attention.causal": True}
        if self.kind != "llama":
            fixed_values["attention.sliding_window"] = 0
        for name, expected_value in fixed_values.items():
            if (value := self.fields.get(key + name, expected_value)) != expected_value:
                raise ValueError(f"model: {self.path.name}: {key}{name} {value!r} is not modelled yet")
        return {
            "model_type": "mistral" if window_size else self.kind,
            "sliding_window": window_size or None,
            "rope_scaling": rope_factors and {"rope_type": "factors", "factors": rope_factors.values().tolist()},
            "hidden_size": hidden_size,
            "intermediate_size": self._whole(f"{key}feed_forward_length"),
            "num_hidden_layers": self._whole(f"{key}block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._whole(f"{key}attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": self._whole(f"{key}context_length"),
            "rope_theta": self._number(f"{key}rope.freq_base", 10000.0),
            # It is stored as fp32, which reads 9.99e-06.
            "rms_norm_eps": round(self._number(f"{key}attention.layer_norm_rms_epsilon"), 12),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
        }
