"""The drafter that an engine is asked for: its files are checked before any weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.engine.choose.model_shapes import LargestSizes
from rooflab.engine.load.tokenizer import Tokenizer
from rooflab.engine.load.weights import load_weights
from rooflab.engine.model import Model
from rooflab.engine.ops import resolve
from rooflab.engine.speculate.draft_model import LayersDrafter, ModelDrafter
from rooflab.engine.speculate.drafter import Drafter, Speculation
from rooflab.engine.speculate.eagle import EagleDrafter, eagle_shapes
from rooflab.engine.speculate.heads import HeadFiles, Shapes, check_shapes
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.medusa import MedusaDrafter, medusa_shapes
from rooflab.engine.speculate.ngram import NgramDrafter
from rooflab.engine.speculate.runner import SpeculativeRunner
from rooflab.engine.speculate.speculator import Speculator
from rooflab.roofline.architecture import Architecture

Opened = tuple[Architecture, Tokenizer | None, Iterator[tuple[str, torch.Tensor]], Any, Any]


@dataclass(frozen=True)
class DraftSource:
    """Where a drafter's weights are."""

    rows: int = 1
    """Most rows of a sequence in a step."""
    arch: Architecture | None = None
    """Of a model, or of the layer of a head, with pages of its own; None if it has none."""
    tensors: Iterator[tuple[str, torch.Tensor]] = iter(())
    layers: int = 0
    """Of the model itself."""
    files: HeadFiles | None = None
    shapes: Shapes = field(default_factory=dict)
    """Of the heads' tensors."""


def opened(
    asked: Speculation | None,
    arch: Architecture,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    open_model: Callable[[str], Opened],
) -> DraftSource:
    """Checks what `asked` names beside the model of `arch`, and opens it; no weights are read.

    Raises `ValueError` on files that are no draft, a draft of another vocabulary, and one for shorter texts.
    """
    if asked is None:
        return DraftSource()
    rows = asked.rows(max_model_len)
    if asked.kind == "ngram":
        return DraftSource(rows)
    if asked.kind in ("medusa", "eagle"):
        return _heads(rows, asked, arch, max_model_len)
    if str(asked.draft).isdigit():
        layers = int(str(asked.draft))
        if not 0 < layers < arch.num_layers:
            raise ValueError(f"draft: expected 1 to {arch.num_layers - 1} of the model's first layers, got {layers}")
        return DraftSource(rows, layers=layers)
    own, own_tokenizer, tensors, *_ = open_model(str(asked.draft))
    if own.vocab_size != arch.vocab_size:
        raise ValueError(f"draft: expected a vocabulary of {arch.vocab_size} tokens, got {own.vocab_size} ({own.name})")
    if tokenizer is not None and own_tokenizer is not None and (other := tokenizer.other_token(own_tokenizer)):
        raise ValueError(f"draft: expected the model's vocabulary, got one in which {other[0]!r} is token {other[1]}")
    if own.max_position < max_model_len:
        most = f"{max_model_len} tokens, which is max_model_len"
        raise ValueError(f"draft: expected a model for {most}, got one for {own.max_position} ({own.name})")
    return DraftSource(rows, own, tensors)


def _heads(rows: int, asked: Speculation, arch: Architecture, max_model_len: int) -> DraftSource:
    files = HeadFiles(Path(str(asked.draft)))
    found, own = files.shapes(), None
    if asked.kind == "medusa":
        wanted = medusa_shapes(found, arch, asked.num_tokens)
    else:
        own = Architecture.from_config(files.folder, name=files.folder.name)
        sizes = {"hidden_size": arch.hidden_size, "vocab_size": arch.vocab_size, "num_layers": 1}
        for name, size in sizes.items():
            if getattr(own, name) != size:
                raise ValueError(f"draft: expected a head with {name} {size}, got {getattr(own, name)}")
        if own.max_position < max_model_len:
            raise ValueError(f"draft: expected a head for {max_model_len} tokens, got one for {own.max_position}")
        wanted = eagle_shapes(found, own)
    check_shapes(found, wanted)
    return DraftSource(rows, own, files=files, shapes=wanted)


def build(
    asked: Speculation | None,
    source: DraftSource,
    about: tuple[Any, ...],
    limits: LargestSizes,
    swap: Mapping[str, str] | None,
    interpret: bool,
) -> Speculator | None:
    """The speculator that is asked for, if one is; its runner is made of `about`.  Reads the drafter's weights.

    Raises `ValueError` if they are not its own, or if no kernel can run.
    """
    if asked is None:
        return None
    runner = SpeculativeRunner(*about)
    runner.drafter = _drafter(asked, source, runner, limits, swap, interpret)
    return Speculator(runner, Lengths(asked.num_tokens))


def _drafter(
    asked: Speculation,
    source: DraftSource,
    runner: SpeculativeRunner,
    limits: LargestSizes,
    swap: Mapping[str, str] | None,
    interpret: bool,
) -> Drafter:
    if asked.kind == "ngram":
        return NgramDrafter()
    if source.layers:
        return LayersDrafter(runner, source.layers)
    if source.files is not None and source.arch is None:
        return MedusaDrafter(runner, source.files.tensors(source.shapes, limits))
    assert source.arch is not None
    ops = resolve(replace(limits, arch=source.arch), swap, interpret)
    if source.files is not None:
        return EagleDrafter(runner, source.arch, source.files.tensors(source.shapes, limits), ops)
    weights = load_weights(source.arch, source.tensors, limits.dtype, limits.device)
    return ModelDrafter(runner, Model(source.arch, weights, ops, limits.max_model_len), ops)
