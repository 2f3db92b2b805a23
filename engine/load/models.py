"""Opens a model by its name: a preset with random weights, or a checkpoint with its weights and settings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rooflab.engine.load.checkpoints import GGUFCheckpoint, open_checkpoint
from rooflab.engine.load.coded import Weight
from rooflab.engine.load.generation import read_generation
from rooflab.engine.load.model_files import path_of
from rooflab.engine.load.tokenizer import Numbers, Texts, Tokenizer
from rooflab.engine.load.weights import dummy_tensors
from rooflab.engine.options import check_groups
from rooflab.engine.sequence import MODEL_SETTINGS
from rooflab.roofline.architecture import Architecture, get_architecture

OpenedModel = tuple[Architecture, Texts, Iterable[tuple[str, Weight]], frozenset[int], dict[str, float], list[str]]
"""What `open_model` returns."""


def open_model(model: str, dummy: bool, seed: int, device: torch.device, codes: str = "") -> OpenedModel:
    """Returns a model's architecture, tokenizer, tensors, end tokens and own settings.  Reads tensors one at a time.

    With `codes` (`int8`, `int4` or `keep`), quantised matrices of a GGUF file keep their codes.  With `keep`, the last
    value has the names of the matrices for which this is impossible, and a log line names them.

    Raises `ValueError` if a file of the model asks for something that the engine does not support."""
    if dummy:
        arch = get_architecture(model)
        check_groups(arch, codes)
        if codes == "keep":
            raise ValueError("dtype: keep needs the codes of a GGUF file, and random weights have none")
        return arch, Numbers(arch.vocab_size), dummy_tensors(arch, seed, device), frozenset(), {**MODEL_SETTINGS}, []
    checkpoint = open_checkpoint(path_of(model))
    check_groups(checkpoint.architecture, codes)
    vocab_size = checkpoint.architecture.vocab_size
    end_ids = end_tokens(checkpoint.ends(), vocab_size)  # before transformers reads them, whose errors are long
    tokenizer = Tokenizer(checkpoint.path)
    if tokenizer.size > vocab_size:
        raise ValueError(f"model: its tokenizer has {tokenizer.size} tokens, and its embedding has {vocab_size}")
    end_ids |= end_tokens({"the tokenizer": tokenizer.eos_token_id, "its turns": tokenizer.turn_ends}, vocab_size)
    settings = read_generation(*checkpoint.generation())
    plain: dict[str, str] = {}
    if codes == "keep":
        if not isinstance(checkpoint, GGUFCheckpoint):
            raise ValueError(f"dtype: keep needs the codes of a GGUF file, got the folder {checkpoint.path}")
        plain = checkpoint.plain_matrices()
    if plain:
        names = ", ".join(f"{name} ({kind})" for name, kind in plain.items())
        logging.getLogger(__name__).warning("dtype keep: dequantised to bfloat16: %s", names)
    tensors = checkpoint.tensors(bool(codes)) if isinstance(checkpoint, GGUFCheckpoint) else checkpoint.tensors()
    return checkpoint.architecture, tokenizer, tensors, end_ids, settings, [*plain]


def end_tokens(sources: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Returns the ids of all end tokens in the files `sources`.  Raises `ValueError` on ids outside the vocabulary."""
    tokens = set[int]()
    for source, given_ids in sources.items():
        end_ids = [] if given_ids is None else given_ids if isinstance(given_ids, list) else [given_ids]
        if not all(type(token) is int and 0 <= token < vocab_size for token in end_ids):
            raise ValueError(f"model: expected ids below {vocab_size} as end tokens in {source}, got {given_ids!r}")
        tokens.update(end_ids)
    return frozenset(tokens)
