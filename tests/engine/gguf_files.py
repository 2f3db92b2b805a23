"""Makes GGUF files for tests, with any keys and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

U16, U32, I32, F32, BOOL, TEXT, ARRAY, U64, F64 = 2, 4, 5, 6, 7, 8, 9, 10, 12
Value = tuple[int, Any]
"""The type of a key's value, and the value."""
BASE: dict[str, Value] = {
    "general.architecture": (TEXT, "llama"),
    "llama.block_count": (U32, 2),
    "llama.context_length": (U32, 256),
    "llama.embedding_length": (U32, 192),
    "llama.feed_forward_length": (U32, 384),
    "llama.attention.head_count": (U32, 6),
    "llama.attention.head_count_kv": (U32, 2),
    "llama.rope.freq_base": (F32, 500.0),
    "llama.attention.layer_norm_rms_epsilon": (F32, 0.25),
}
"""The keys of the model of `tiny_model`, but with a rotation and an epsilon that show."""
TENSORS = {"token_embd.weight": np.zeros((1024, 192), "f"), "output_norm.weight": np.zeros(192, "f")}


def write(path: Path, keys: Mapping[str, Value], tensors: Mapping[str, Any] = TENSORS) -> Path:
    """Writes a file.  A tensor is an array, or its values and the quantisation of ggml."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()  # it has an architecture of its own
    writer.data_alignment = keys.get("general.alignment", (U32, 32))[1] or 32
    for name, (kind, value) in keys.items():
        writer.add_key_value(name, value, gguf.GGUFValueType(kind))
    for name, values in tensors.items():
        if isinstance(values, tuple):
            quantised = gguf.quants.quantize(*values)
            writer.add_tensor(name, quantised, raw_dtype=values[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
