"""What the header of a GGUF says of the model: its architecture, or the key for which the model is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from rooflab.engine.load.gguf_file import GGUFFile, GGUFTensor, read_gguf
from rooflab.roofline.architecture import Architecture

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma")
FACTORS = "rope_freqs.weight"
"""What divides each frequency: llama.cpp's converter works it out of Llama 3's rope scaling."""
_MAY_CHANGE_IT = re.compile("rope|attention|scal|softcap|window|expert|parallel|pooling")
_READ = frozenset(
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length attention.causal"
    " attention.layer_norm_rms_epsilon attention.sliding_window rope.dimension_count rope.freq_base".split()
)
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFModel:
    """A GGUF file, or the files into which one was split: pass the first.

    `fields` are the keys of the first, `tensors` those of all, by ggml's names.  Raises `ValueError` if a file is
    damaged or missing, and for a key that may change an answer and is not read, or is of another type or value.
    """

    def __init__(self, path: Path):
        self.path = path
        first = read_gguf(path)
        self.fields = first.fields
        self.kind = self.fields.get("general.architecture")
        if self.kind not in GGUF_ARCHITECTURES:
            known = ", ".join(GGUF_ARCHITECTURES)
            raise ValueError(f"model: expected general.architecture to be one of {known}, got {self.kind!r}")
        self.tensors: dict[str, GGUFTensor] = {}
        for file in (first, *self._other_splits()):
            if both := self.tensors.keys() & file.tensors.keys():
                raise ValueError(f"model: {file.path.name} has the tensor {min(both)}, as a file before it")
            self.tensors |= file.tensors
        self._refuse_unmodelled()
        self.architecture = Architecture.from_config(self._config(), name=path.stem)

    def _other_splits(self) -> list[GGUFFile]:
        """The files with the rest of the tensors, which llama.cpp finds by their names."""
        count, own = self._whole("split.count", 1), self._whole("split.no", 0)
        if count < 2:
            return []
        name = _SPLIT.fullmatch(self.path.name)
        if own or name is None or int(name[3]) != count:
            wanted = f"{name[1] if name else self.path.stem}-00001-of-{count:05}.gguf"
            raise ValueError(f"model: expected {wanted}, the first of {count} files, got {self.path.name}")
        others = [self.path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(2, count + 1)]
        if missing := [other.name for other in others if not other.is_file()]:
            raise ValueError(f"model: {self.path.name} is the first of {count} files; {', '.join(missing)} is missing")
        return [read_gguf(other) for other in others]

    def _refuse_unmodelled(self) -> None:
        for name, value in self.fields.items():
            key = name.removeprefix(f"{self.kind}.")
            if key == name or key.startswith("rope.scal") or key in _READ:
                continue
            if _MAY_CHANGE_IT.search(key) and value:
                raise ValueError(f"model: {self.path.name}: {name} {value!r} is not modelled yet")

    def _whole(self, name: str, default: int | None = None) -> int:
        """A key that holds a whole number of 0 or more, below 2**31; without a default it must be there."""
        value = self.fields.get(name, default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise ValueError(f"model: {self.path.name}: expected a whole number below 2**31 as {name}, got {value!r}")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        """A key that holds a finite number above 0."""
        value: Any = self.fields.get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"model: {self.path.name}: expected a finite number above 0 as {name}, got {value!r}")
        return float(value)

    def _config(self) -> dict[str, Any]:
        """The same model as a config.json says it."""
        own = f"{self.kind}."
        hidden, heads = self._whole(f"{own}embedding_length"), self._whole(f"{own}attention.head_count")
        embedding = self.tensors.get("token_embd.weight")
        if not heads or embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"model: {self.path.name} has no {own}attention.head_count or no matrix token_embd.weight")
        head_dim = self._whole(f"{own}attention.key_length", hidden // heads)
        window = self._whole(f"{own}attention.sliding_window", 0)
        expected = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "attention.causal": True}
        if self.kind != "llama":
            expected["attention.sliding_window"] = 0
        for name, needed in expected.items():
            if (found := self.fields.get(own + name, needed)) != needed:
                raise ValueError(f"model: {self.path.name}: {own}{name} {found!r} is not modelled yet")
        return {
            "model_type": "mistral" if window else self.kind,
            "sliding_window": window or None,
            "rope_scaling": self._rope_scaling(),
            "hidden_size": hidden,
            "intermediate_size": self._whole(f"{own}feed_forward_length"),
            "num_hidden_layers": self._whole(f"{own}block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._whole(f"{own}attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": self._whole(f"{own}context_length"),
            "rope_theta": self._number(f"{own}rope.freq_base", 10000.0),
            # It is stored as fp32, which reads 9.99e-06.
            "rms_norm_eps": round(self._number(f"{own}attention.layer_norm_rms_epsilon"), 12),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        prefix = f"{self.kind}.rope.scaling."
        found = {name.removeprefix(prefix): self.fields[name] for name in self.fields if name.startswith(prefix)}
        for read in ("finetuned", "original_context_length"):
            found.pop(read, None)
        old = f"{self.kind}.rope.scale_linear"  # llama.cpp reads it where there is no factor
        if self.fields.get(old) and not found.get("factor"):
            found["factor"] = self._number(old)
        kind, length = found.pop("type", "linear"), self._whole(f"{prefix}original_context_length", 0)
        if kind not in ("none", "linear", "yarn"):
            raise ValueError(f"model: {self.path.name}: {prefix}type {kind!r} is not modelled yet")
        factors = self.tensors.get(FACTORS)
        if kind == "none" or (kind == "linear" and found.get("factor", 1.0) in (0.0, 1.0)):
            for key in sorted(found.keys() - {"factor"}):
                raise ValueError(f"model: {self.path.name}: {prefix}{key} {found[key]!r} is not modelled yet")
            return None if factors is None else {"rope_type": "factors", "factors": factors.values().tolist()}
        if factors is not None:
            raise ValueError(f"model: {self.path.name} has both {FACTORS} and rope scaling {kind}")
        if kind == "yarn" and length:
            found["original_max_position_embeddings"] = length
        return {"rope_type": kind, **found}
