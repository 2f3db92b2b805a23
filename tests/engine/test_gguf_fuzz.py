"""Headers of GGUF files: each is the model that its keys say, or is refused by a sentence that names a key;
and values of other types in every file of a model.

What each key means is said here a second time, as the change of a config.json whose logits `test_config_fuzz.py`
compares with transformers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_model import CONFIG, write_model

from rooflab.engine.checkpoints import open_checkpoint
from rooflab.engine.llm import open_model
from rooflab.engine.weights import load_weights
from rooflab.roofline.architecture import Architecture

U32, I32, F32, BOOL, TEXT, ARRAY, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
REFUSED = None
OURS = {
    "block_count": "num_layers", "head_count_kv": "num_kv_heads", "key_length": "head_dim",
    "type": "rope scaling yarn misses factor", "count": "the first of 2 files",
    "architecture": "qwen2.",
}  # fmt: skip
"""Keys that are refused by the name that they have in `Architecture`, and three by what they need."""
Key = tuple[str, int, Any]

BASE: dict[str, tuple[int, Any]] = {
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
AS_CONFIG = {**CONFIG, "rope_theta": 500.0, "rms_norm_eps": 0.25}
DROPPED: dict[str, dict[str, Any] | None] = {
    **dict.fromkeys(BASE, REFUSED),
    "llama.attention.head_count_kv": {"num_key_value_heads": None},
    "llama.rope.freq_base": {"rope_theta": 10000.0},
}
"""What a missing key means."""
YARN = {"rope_type": "yarn", "factor": 4.0}
VALUES: list[tuple[list[Key], dict[str, Any] | None]] = [
    ([("general.architecture", TEXT, "qwen2")], REFUSED),
    ([("general.architecture", TEXT, "mamba")], REFUSED),
    ([("general.name", TEXT, "Löwe")], {}),
    ([("general.alignment", U32, 64)], {}),
    ([("general.alignment", U32, 0)], REFUSED),
    ([("llama.block_count", U64, 2)], {}),
    ([("llama.block_count", U32, 0)], REFUSED),
    ([("llama.context_length", U32, 64)], {"max_position_embeddings": 64}),
    ([("llama.context_length", I32, -1)], REFUSED),
    ([("llama.embedding_length", U32, 96)], {"hidden_size": 96}),
    ([("llama.attention.head_count", U32, 12)], {"num_attention_heads": 12}),
    ([("llama.attention.head_count", U32, 0)], REFUSED),
    ([("llama.attention.head_count_kv", U32, 5)], REFUSED),
    ([("llama.attention.head_count_kv", ARRAY, [2, 2])], REFUSED),
    ([("llama.attention.key_length", U32, 32)], {"head_dim": 32}),
    ([("llama.attention.key_length", U32, 0)], REFUSED),
    ([("llama.attention.value_length", U32, 8)], REFUSED),
    ([("llama.attention.causal", BOOL, True)], {}),
    ([("llama.attention.causal", BOOL, False)], REFUSED),
    ([("llama.attention.sliding_window", U32, 9)], {"model_type": "mistral", "sliding_window": 9}),
    ([("llama.attention.sliding_window", U32, 0)], {}),
    ([("llama.attention.sliding_window", F32, 9.5)], REFUSED),
    ([("llama.attention.scale", F32, 0.5)], REFUSED),
    ([("llama.attention.layer_norm_rms_epsilon", F32, 1e-5)], {"rms_norm_eps": 1e-5}),
    ([("llama.attention.layer_norm_rms_epsilon", F64, 0.5)], {"rms_norm_eps": 0.5}),
    ([("llama.attention.layer_norm_rms_epsilon", F32, 0.0)], REFUSED),
    ([("llama.rope.freq_base", F32, 77.0)], {"rope_theta": 77.0}),
    ([("llama.rope.freq_base", U32, 77)], {"rope_theta": 77.0}),
    ([("llama.rope.freq_base", F32, 0.0)], REFUSED),
    ([("llama.rope.freq_base", F32, float("nan"))], REFUSED),
    ([("llama.rope.freq_base_swa", F32, 77.0)], REFUSED),
    ([("llama.rope.dimension_count", U32, 8)], REFUSED),
    ([("llama.rope.scale_linear", F32, 4.0)], {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ([("llama.rope.scale_linear", F32, 1.0)], {}),
    ([("llama.rope.scaling.factor", F32, 3.0)], {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    ([("llama.rope.scaling.factor", F32, -3.0)], REFUSED),
    ([("llama.rope.scaling.factor", F32, float("inf"))], REFUSED),
    ([("llama.rope.scaling.type", TEXT, "none"), ("llama.rope.scaling.factor", F32, 3.0)], {}),
    ([("llama.rope.scaling.type", TEXT, "longrope"), ("llama.rope.scaling.factor", F32, 3.0)], REFUSED),
    ([("llama.rope.scaling.type", TEXT, "yarn"), ("llama.rope.scaling.factor", F32, 4.0)], {"rope_scaling": YARN}),
    ([("llama.rope.scaling.type", TEXT, "yarn")], REFUSED),
    ([("llama.rope.scaling.type", TEXT, "yarn"), ("llama.rope.scaling.factor", F32, 4.0),
      ("llama.rope.scaling.original_context_length", U32, 16)],
     {"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}),
    ([("llama.rope.scaling.type", TEXT, "yarn"), ("llama.rope.scaling.factor", F32, 4.0),
      ("llama.rope.scaling.original_context_length", TEXT, "16")], REFUSED),
    ([("llama.rope.scaling.finetuned", BOOL, True)], {}),
    ([("llama.rope.scaling.attn_factor", F32, 2.0)], REFUSED),
    ([("llama.attn_logit_softcapping", F32, 30.0)], REFUSED),
    ([("llama.logit_scale", F32, 0.5)], REFUSED),
    ([("llama.expert_count", U32, 8)], REFUSED),
    ([("llama.expert_count", U32, 0)], {}),
    ([("llama.use_parallel_residual", BOOL, True)], REFUSED),
    ([("llama.vocab_size", U32, 1024)], {}),
    ([("split.count", U32, 2)], REFUSED),
    ([("split.count", TEXT, "1")], REFUSED),
    ([("quantize.imatrix.file", TEXT, "x")], {}),
]  # fmt: skip


def headers() -> Iterable[tuple[list[Key], dict[str, Any] | None]]:
    """Keys that are other than in `BASE`, those of none as None, and what they change in a config."""
    yield from VALUES
    for name, change in DROPPED.items():
        yield [(name, U32, None)], change
    for one, other in combinations(VALUES, 2):
        keys = one[0] + other[0]
        if one[1] and other[1] and len({key[0] for key in keys}) == len(keys):
            yield keys, one[1] | other[1]


def wanted(change: dict[str, Any] | None) -> Architecture | None:
    """What the header means, or None if it is refused: each of two values may be lawful, but not both."""
    with suppress(ValueError):
        return None if change is REFUSED else Architecture.from_config({**AS_CONFIG, **change}, name="tiny")
    return None


def test_a_header_is_the_model_of_its_keys_or_is_refused_by_name(tmp_path: Path) -> None:
    path, loaded = tmp_path / "tiny.gguf", 0
    for keys, change in headers():
        header = {name: (name, *value) for name, value in BASE.items()} | {key[0]: key for key in keys}
        write(path, [key for key in header.values() if key[2] is not None])
        if (expected := wanted(change)) is not None:
            assert open_checkpoint(path).architecture == expected, keys
            loaded += 1
            continue
        with pytest.raises(ValueError) as error:
            open_checkpoint(path)
        names = [key[0].rpartition(".")[2] for key in keys]
        names += [OURS[name] for name in names if name in OURS] + list(change or ())
        assert any(name in str(error.value) for name in names), (keys, str(error.value))
    assert loaded > 40


@pytest.mark.parametrize("name", BASE)
def test_a_key_that_stands_twice_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / "tiny.gguf", f"{name[:-1]}?"
    write(path, [(one, *value) for one, value in (BASE | {other: BASE[name]}).items()])
    path.write_bytes(path.read_bytes().replace(other.encode(), name.encode()))
    with pytest.raises(ValueError, match=name):
        open_checkpoint(path)


def write(path: Path, keys: Iterable[Key]) -> None:
    """A GGUF file with these keys and the tensors of the tiny model."""
    writer, keys = gguf.GGUFWriter(path, ""), list(keys)
    writer.kv_data[0].clear()  # it has an architecture of its own
    writer.data_alignment = next((value for name, _, value in keys if name == "general.alignment" and value), 32)
    for name, kind, value in keys:
        writer.add_key_value(name, value, gguf.GGUFValueType(kind))
    for name, shape in (("token_embd.weight", (1024, 192)), ("output_norm.weight", (192,))):
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WRONG = ["x", "", [], {}, ["x"], [[1]], [None], {"x": 1}, 0, -1, 1.5, True, None, 10**30, 10**400, float("nan")]
HEADER: dict[str, tuple[int, Any]] = BASE | {
    "general.sampling.temp": (F32, 0.6), "general.sampling.top_k": (I32, 20), "general.sampling.mirostat": (I32, 0),
    "general.sampling.penalty_repeat": (F32, 1.1), "llama.rope.scaling.factor": (F32, 2.0),
    "llama.rope.scaling.type": (TEXT, "linear"), "tokenizer.chat_template": (TEXT, "{{ messages }}"),
    "tokenizer.ggml.model": (TEXT, "gpt2"), "tokenizer.ggml.pre": (TEXT, "qwen2"),
    "tokenizer.ggml.tokens": (ARRAY, ["a", "b", "ab"]), "tokenizer.ggml.token_type": (ARRAY, [1, 1, 1]),
    "tokenizer.ggml.merges": (ARRAY, ["a b"]), "tokenizer.ggml.add_bos_token": (BOOL, False),
    "tokenizer.ggml.eos_token_id": (U32, 2), "tokenizer.ggml.eot_token_id": (U32, 1),
}  # fmt: skip
OTHER_NAMES = {
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads|k_proj", "num_hidden_layers": "layer",
    "max_position_embeddings": "max_position", "weight_map": "tensors", "config": "model_type",
    "embedding_length": "head_dim", "head_count": "heads", "temp": "temperature",
    "penalty_repeat": "repetition_penalty", "tokens": "token_type", **OURS,
}  # fmt: skip


def refused(model: Path, names: Iterable[Any]) -> bool:
    """Whether a model is refused, by one sentence with one of the names."""
    try:
        arch, tokenizer, tensors, *_ = open_model(str(model), False, 0, torch.device("cpu"))
        if model.is_dir():
            load_weights(arch, tensors, torch.float32, torch.device("cpu"))
    except ValueError as error:
        found = str(error)
        assert "\n" not in found and len(found) < 500, found
        assert any(re.search(f"{re.escape(str(name))}|{OTHER_NAMES.get(name, '^$')}", found) for name in names), found
        return True
    return False


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of a JSON value and of all in it; of many alike the first two."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    some = list(inner)[: 2 if isinstance(value, list) or len(value) > 40 else 40] if inner else []
    return [place, *(found for name, one in some for found in places(one, (*place, name)))]


def test_a_value_of_another_type_in_a_file_of_a_model_is_one_sentence(tmp_path: Path) -> None:
    folder, draw, found = write_model(tmp_path / "m", torch_dtype="float32", rope_scaling=None), random.Random(2), []
    told = {"temperature": 0.6, "top_k": 20, "suppress_tokens": [7], "bad_words_ids": [[8]], "min_length": 0}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258], **told}))
    for file in sorted(folder.glob("*.json")):
        whole = file.read_text()
        for place in places(json.loads(whole)):
            for wrong in draw.sample(WRONG, 2):
                changed = [json.loads(whole)]
                inner: Any = changed
                for name in (0, *place)[:-1]:
                    inner = inner[name]
                inner[(0, *place)[-1]] = wrong
                file.write_text(json.dumps(changed[0]))
                found.append(refused(folder, (*place, file.stem, "tokenizer.json")))
        file.write_text(whole)
    assert 0.4 < sum(found) / len(found) < 0.95 and not refused(folder, ())
    (folder / "config.json").write_text("[" * 100_000)
    assert refused(folder, ["config.json is not JSON"])


def test_a_key_of_another_type_in_a_gguf_is_one_sentence(tmp_path: Path) -> None:
    path, wrong = tmp_path / "tiny.gguf", [*zip((U32, F32, TEXT, BOOL, U64), (5, -1.5, "x", True, 2**40), strict=True)]
    for name in HEADER:
        for value in (*wrong, (ARRAY, ["x"]), (ARRAY, [1, 2]), (ARRAY, [0.5])):
            write(path, [(one, *of) for one, of in (HEADER | {name: value}).items()])
            refused(path, [name.rpartition(".")[2]])
    write(path, [(name, *of) for name, of in HEADER.items()])
    assert not refused(path, ())
