"""Builds the drafter that the options ask for.  The drafter's files are checked before the model's weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.engine.choose.model_shapes import LargestSizes
from rooflab.engine.load.coded import Weight
from rooflab.engine.load.models import OpenedModel
from rooflab.engine.load.tokenizer import Texts, Tokenizer
from rooflab.engine.load.weights import load_weights
from rooflab.engine.model import Model
from rooflab.engine.ops import resolve
from rooflab.engine.speculate.draft_model import ModelDrafter
from rooflab.engine.speculate.drafter import Speculation
from rooflab.engine.speculate.eagle import EagleDrafter, read_head
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.ngram import NgramDrafter
from rooflab.engine.speculate.runner import SpeculativeRunner
from rooflab.engine.speculate.speculator import Speculator
from rooflab.roofline.architecture import Architecture


@dataclass(frozen=True)
class DraftSource:
    """Describes a drafter: architecture, weights, and the largest number of rows (tokens) of a sequence in a step."""

    rows: int = 1
    """The most rows of a sequence in a step."""
    arch: Architecture | None = None
    """The draft model, or the layer of a head.  Both have their own pages.  None for a drafter without a model."""
    tensors: Iterable[tuple[str, Weight]] = ()
    """The weights by name.  The weights of a draft model are not read yet."""
    plain: bool = False
    """Whether some matrices of a draft model are dequantised although the others keep their codes."""


def opened(
    asked: Speculation | None,
    arch: Architecture,
    tokenizer: Texts,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    open_model: Callable[[str], OpenedModel],
) -> DraftSource:
    """Opens the drafter that `asked` describes, for a model of `arch`.  An EAGLE head is read in `dtype` on `device`.

    Raises `ValueError` if the files hold no drafter, or if its vocabulary or context length does not fit the model."""
    if asked is None:
        return DraftSource()
    max_rows = asked.rows(max_model_len)
    if asked.kind == "ngram":
        return DraftSource(max_rows)
    expected_sizes = {"vocab_size": arch.vocab_size}
    if asked.kind == "eagle":
        weight_files = sorted((folder := Path(str(asked.draft))).glob("*.safetensors"))
        if not weight_files:
            raise ValueError(f"draft: expected a folder with *.safetensors, got {str(folder)!r}")
        draft_arch = Architecture.from_config(folder, name=folder.name)
        expected_sizes |= {"hidden_size": arch.hidden_size, "num_layers": 1}
    else:
        draft_arch, theirs, tensors, *_, plain = open_model(str(asked.draft))
    for name, size in expected_sizes.items():
        if getattr(draft_arch, name) != size:
            raise ValueError(f"draft: expected {name} {size}, got {getattr(draft_arch, name)} ({draft_arch.name})")
    if draft_arch.max_position < max_model_len:
        size_text = f"one for {draft_arch.max_position} ({draft_arch.name})"
        raise ValueError(f"draft: expected a model for {max_model_len} tokens, which is max_model_len, got {size_text}")
    if asked.kind == "eagle":
        return DraftSource(max_rows, draft_arch, read_head(weight_files, draft_arch, dtype, device).items())
    if isinstance(tokenizer, Tokenizer) and isinstance(theirs, Tokenizer) and (clash := tokenizer.other_token(theirs)):
        raise ValueError(f"draft: expected the model's vocabulary, got one in which {clash[0]!r} is token {clash[1]}")
    return DraftSource(max_rows, draft_arch, tensors, bool(plain))


def build(
    asked: Speculation | None,
    source: DraftSource,
    about: tuple[Any, ...],
    limits: LargestSizes,
    swap: Mapping[str, str] | None,
    interpret: bool,
) -> Speculator | None:
    """Builds the object that runs speculative decoding. Returns None if `asked`, the options of speculation, is None.
    `about` holds the arguments of the class `SpeculativeRunner`.

    Raises `ValueError` if a weight of the drafter has a wrong shape, or if no kernel can run the drafter."""
    if asked is None:
        return None
    runner = SpeculativeRunner(*about)
    if source.arch is None:
        runner.drafter = NgramDrafter()
    else:
        if asked.kind == "eagle":  # the weights of a head have no codes
            limits = replace(limits, codes="")
        limits = replace(limits, arch=source.arch, plain=source.plain)
        swap = {op: name for op, name in (swap or {}).items() if op in (*limits.ops, *limits.fused)}
        ops = resolve(limits, swap, interpret)
        if asked.kind == "eagle":
            runner.drafter = EagleDrafter(runner, source.arch, dict(source.tensors), ops)
        else:
            weights = load_weights(source.arch, source.tensors, limits.dtype, limits.device, limits.codes)
            runner.drafter = ModelDrafter(runner, Model(source.arch, weights, ops, limits.max_model_len), ops)
    return Speculator(runner, Lengths(asked.num_tokens))
