"""Opens a model by its name: a preset with random weights, or a checkpoint with its weights and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rooflab.engine.load.checkpoints import open_checkpoint
from rooflab.engine.load.generation import read_generation
from rooflab.engine.load.model_files import path_of
from rooflab.engine.load.tokenizer import Numbers, Texts, Tokenizer
from rooflab.engine.load.weights import dummy_tensors
from rooflab.engine.sequence import MODEL_SETTINGS
from rooflab.roofline.architecture import Architecture, get_architecture


def open_model(
    model: str, dummy: bool, seed: int, device: torch.device
) -> tuple[Architecture, Texts, Iterator[tuple[str, torch.Tensor]], frozenset[int], dict[str, float]]:
    """Returns a model's architecture, tokenizer, tensors, end tokens and own settings.  Reads tensors one at a time.

    Raises `ValueError` if a file of the model asks for something that the engine does not support."""
    if dummy:
        arch = get_architecture(model)
        return arch, Numbers(arch.vocab_size), dummy_tensors(arch, seed, device), frozenset(), {**MODEL_SETTINGS}
    checkpoint = open_checkpoint(path_of(model))
    vocab_size = checkpoint.architecture.vocab_size
    end_ids = end_tokens(checkpoint.ends(), vocab_size)  # before transformers reads them, whose errors are long
    tokenizer = Tokenizer(checkpoint.path)
    if tokenizer.size > vocab_size:
        raise ValueError(f"model: its tokenizer has {tokenizer.size} tokens, and its embedding has {vocab_size}")
    end_ids |= end_tokens({"the tokenizer": tokenizer.eos_token_id, "its turns": tokenizer.turn_ends}, vocab_size)
    settings = read_generation(*checkpoint.generation())
    return checkpoint.architecture, tokenizer, checkpoint.tensors(), end_ids, settings


def end_tokens(sources: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Returns the ids of all end tokens in the files `sources`.  Raises `ValueError` on ids outside the vocabulary."""
    tokens = set[int]()
    for source, given_ids in sources.items():
        end_ids = [] if given_ids is None else given_ids if isinstance(given_ids, list) else [given_ids]
        if not all(type(token) is int and 0 <= token < vocab_size for token in end_ids):
            raise ValueError(f"model: expected ids below {vocab_size} as end tokens in {source}, got {given_ids!r}")
        tokens.update(end_ids)
    return frozenset(tokens)
