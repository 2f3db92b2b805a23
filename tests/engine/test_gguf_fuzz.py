"""Headers of GGUF files: each one gives the model that its keys describe, or is refused by a sentence that names a key;
and values of wrong types in every JSON file of a model.

This file states the meaning of each key again, as a change of a config.json; `test_engine_oracle.py` compares the
logits of such configs with transformers.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import ARRAY, BASE, BOOL, F32, F64, I32, TEXT, U32, U64, Value, write
from tiny_model import CONFIG, write_model

from rooflab.engine.load.checkpoints import open_checkpoint
from rooflab.engine.load.models import open_model
from rooflab.engine.load.weights import load_weights
from rooflab.roofline.architecture import Architecture

OURS = {
    "block_count": "num_layers",
    "head_count_kv": "num_kv_heads",
    "key_length": "head_dim",
    "architecture": "qwen2.",
}
"""Keys that are refused by the name that they have in `Architecture`, and one by what it needs."""

AS_CONFIG = {**CONFIG, "rope_theta": 500.0, "rms_norm_eps": 0.25}
MAY_MISS = {
    "llama.attention.head_count_kv": {"num_key_value_heads": None},
    "llama.rope.freq_base": {"rope_theta": 10000.0},
}
"""What a missing key means; any other of `BASE` may not miss."""
SCALING = "llama.rope.scaling."
MEANT: list[tuple[dict[str, Value], dict[str, Any]]] = [
    ({"general.name": (TEXT, "Löwe"), "general.alignment": (U32, 64), "quantize.imatrix.file": (TEXT, "x")}, {}),
    ({"llama.block_count": (U64, 2), "llama.vocab_size": (U32, 1024), "llama.expert_count": (U32, 0)}, {}),
    ({"llama.attention.causal": (BOOL, True), "llama.attention.sliding_window": (U32, 0)}, {}),
    ({"llama.context_length": (U32, 64)}, {"max_position_embeddings": 64}),
    ({"llama.embedding_length": (U32, 96)}, {"hidden_size": 96}),
    ({"llama.attention.head_count": (U32, 12)}, {"num_attention_heads": 12}),
    ({"llama.attention.key_length": (U32, 32)}, {"head_dim": 32}),
    ({"llama.attention.sliding_window": (U32, 9)}, {"model_type": "mistral", "sliding_window": 9}),
    ({"llama.attention.layer_norm_rms_epsilon": (F32, 1e-5)}, {"rms_norm_eps": 1e-5}),
    ({"llama.attention.layer_norm_rms_epsilon": (F64, 0.5)}, {"rms_norm_eps": 0.5}),
    ({"llama.rope.freq_base": (F32, 77.0)}, {"rope_theta": 77.0}),
    ({"llama.rope.freq_base": (U32, 77)}, {"rope_theta": 77.0}),
    ({"llama.rope.scale_linear": (F32, 1.0), f"{SCALING}finetuned": (BOOL, True)}, {}),
    ({f"{SCALING}type": (TEXT, "linear"), f"{SCALING}factor": (F32, 1.0)}, {}),
    ({f"{SCALING}type": (TEXT, "none"), f"{SCALING}original_context_length": (U32, 16)}, {}),
]
"""Keys, and what they change in a config."""
WRONG_KEYS: dict[str, list[Value]] = {
    "general.architecture": [(TEXT, "qwen2"), (TEXT, "mamba"), (U32, 1)],
    "general.alignment": [(U32, 0)],
    "llama.block_count": [(U32, 0), (F32, 2.0)],
    "llama.context_length": [(I32, -1), (TEXT, "256")],
    "llama.embedding_length": [(ARRAY, [192])],
    "llama.attention.head_count": [(U32, 0), (ARRAY, [6, 6])],
    "llama.attention.head_count_kv": [(U32, 5), (ARRAY, [2, 2]), (BOOL, True)],
    "llama.attention.key_length": [(U32, 0), (F32, 32.0)],
    "llama.attention.value_length": [(U32, 8)],
    "llama.attention.causal": [(BOOL, False)],
    "llama.attention.sliding_window": [(F32, 9.5)],
    "llama.attention.scale": [(F32, 0.5)],
    "llama.attention.layer_norm_rms_epsilon": [(F32, 0.0), (TEXT, "x")],
    "llama.rope.freq_base": [(F32, 0.0), (F32, float("nan")), (TEXT, "x")],
    "llama.rope.freq_base_swa": [(F32, 77.0)],
    "llama.rope.dimension_count": [(U32, 8)],
    "llama.rope.scale_linear": [(F32, 4.0), (TEXT, "1")],
    f"{SCALING}factor": [(F32, 3.0), (F32, -3.0), (F32, float("inf")), (TEXT, "3")],
    f"{SCALING}type": [(TEXT, "yarn"), (U32, 2)],
    f"{SCALING}attn_factor": [(F32, 2.0)],
    "llama.attn_logit_softcapping": [(F32, 30.0)],
    "llama.logit_scale": [(F32, 0.5)],
    "llama.expert_count": [(U32, 8)],
    "llama.use_parallel_residual": [(BOOL, True)],
    "split.count": [(U32, 2), (TEXT, "1")],
    **{name: [(U32, None)] for name in BASE if name not in MAY_MISS},
}


def opened(path: Path, keys: dict[str, Value]) -> Architecture:
    """The model of a file with these keys beside those of `BASE`; a key of None is left out."""
    write(path, {name: value for name, value in (BASE | keys).items() if value[1] is not None})
    return open_checkpoint(path).architecture


def groups(keys: dict[str, Value]) -> set[str]:
    """The names of keys; those of the rope's scaling are one, because one says what another means."""
    return {name.partition("rope.scal")[1] or name for name in keys}


def test_a_header_is_the_model_of_its_keys(tmp_path: Path) -> None:
    """Each change alone, and each two of other keys where the config allows both."""
    lawful = [*MEANT, *(({name: (U32, None)}, change) for name, change in MAY_MISS.items())]
    for keys, change in lawful:
        expected = Architecture.from_config({**AS_CONFIG, **change}, name="tiny")
        assert opened(tmp_path / "tiny.gguf", keys) == expected, keys
    for one, other in combinations(lawful, 2):
        if not groups(one[0]) & groups(other[0]):
            try:
                expected = Architecture.from_config({**AS_CONFIG, **one[1], **other[1]}, name="tiny")
            except ValueError:
                continue
            assert opened(tmp_path / "tiny.gguf", one[0] | other[0]) == expected, (one, other)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, some in WRONG_KEYS.items() for value in some])
def test_a_key_that_says_another_model_is_refused_by_name(tmp_path: Path, name: str, value: Value) -> None:
    short = name.rpartition(".")[2]
    with pytest.raises(ValueError, match=f"{short}|{OURS.get(short, short)}"):
        opened(tmp_path / "tiny.gguf", {name: value})


@pytest.mark.parametrize("name", BASE)
def test_a_key_that_stands_twice_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / "tiny.gguf", f"{name[:-1]}?"
    write(path, BASE | {other: BASE[name]})
    path.write_bytes(path.read_bytes().replace(other.encode(), name.encode()))
    with pytest.raises(ValueError, match=name):
        open_checkpoint(path)


@pytest.mark.parametrize(("file", "change"), [
    ("config", {"hidden_size": "x"}), ("config", {"num_hidden_layers": 1.5}), ("config", {"rms_norm_eps": "x"}),
    ("config", {"rope_theta": [1]}), ("config", {"num_attention_heads": 10**30}), ("config", {"rope_scaling": "x"}),
    ("config", {"vocab_size": True}), ("config", {"tie_word_embeddings": "x"}), ("config", {"model_type": {}}),
    ("config", {"hidden_act": 0}), ("generation_config", {"temperature": "x"}), ("generation_config", {"top_k": 1.5}),
    ("generation_config", {"suppress_tokens": 7}), ("generation_config", {"bad_words_ids": [None]}),
    ("model.safetensors.index", {"weight_map": []}), ("model.safetensors.index", {"weight_map": {"x": 1}}),
])  # fmt: skip
def test_a_value_of_another_type_in_a_file_of_a_model_is_one_sentence(tmp_path: Path, file: str, change: Any) -> None:
    path, (name,) = write_model(tmp_path) / f"{file}.json", change
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change}))
    with pytest.raises(ValueError, match={"weight_map": "tensors"}.get(name, name)) as error:
        arch, _, tensors, *_ = open_model(str(tmp_path), False, 0, torch.device("cpu"))
        load_weights(arch, tensors, torch.float32, torch.device("cpu"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("file", ["config", "generation_config", "model.safetensors.index"])
def test_a_file_that_is_no_object_is_refused_by_its_name(tmp_path: Path, file: str) -> None:
    for content in ("[]", "{", "[" * 100_000):
        (write_model(tmp_path) / f"{file}.json").write_text(content)
        with pytest.raises(ValueError, match=file):
            open_model(str(tmp_path), False, 0, torch.device("cpu"))
