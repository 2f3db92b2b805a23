"""What heads have in common that are trained on the model's hidden states: their files, and the states that they read.

A chain of the likeliest tokens is drafted, not a tree.  A head's state is the model's hidden state at the token before
the newest, which the step before computed; where a prefix was found in the KV cache it is not known, and is 0, which
costs acceptance at the first drafts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open

from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.drafter import Drafter, Reads
from rooflab.engine.speculate.runner import SpeculativeRunner

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadFiles:
    """The tensors of a folder with *.safetensors."""

    folder: Path

    def shapes(self) -> Shapes:
        """Names and shapes, without the tensors.  Raises `ValueError` if there is no whole file."""
        return {name: tuple(handle.get_slice(name).get_shape()) for handle, name in self._each()}

    def tensors(self, wanted: Iterable[str], limits: Any) -> dict[str, torch.Tensor]:
        """Those of `wanted`, in the model's dtype and on its device."""
        names = set(wanted)
        found = {name: handle.get_tensor(name) for handle, name in self._each() if name in names}
        return {name: tensor.to(limits.device, limits.dtype) for name, tensor in found.items()}

    def _each(self) -> Iterator[tuple[Any, str]]:
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"draft: expected a folder with *.safetensors, got {str(self.folder)!r}")
        for file in files:
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118
                        yield handle, name
            except SafetensorError as error:
                raise ValueError(f"draft: {file.name} is not a whole safetensors file: {error}") from error


def check_shapes(found: Shapes, wanted: Shapes) -> None:
    """Raises `ValueError` unless every tensor that is wanted is there with its shape."""
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"draft: the heads lack the tensor {name!r}, of shape {shape}")
        if found[name] != shape:
            raise ValueError(f"draft: expected {name} of shape {shape}, got {found[name]}")


class HiddenDrafter(Drafter):
    """Keeps for each sequence the hidden state behind which its newest token was drawn, and that token's position."""

    reads: Reads = "hidden states"

    def __init__(self, runner: SpeculativeRunner):
        self.runner = runner
        self._hidden: WeakKeyDictionary[EngineSequence, tuple[int, torch.Tensor]] = WeakKeyDictionary()
        """For each sequence a position, and the hidden state (H,) before the token there."""

    def accepted(self, sequences: Sequence[EngineSequence], counts: Sequence[int], states: torch.Tensor) -> None:
        """Keeps the states."""
        for one, count, state in zip(sequences, counts, states, strict=True):
            self._hidden[one] = (len(one.token_ids) - 1 + count, state)

    def states(self, sequences: Sequence[EngineSequence], positions: Sequence[int]) -> torch.Tensor:
        """The hidden states (rows, H) before the tokens at `positions`; 0 where it is not known."""
        arch, like = self.runner.model.arch, self.runner.model.embedding
        none = torch.zeros(arch.hidden_size, dtype=like.dtype, device=like.device)
        known = (self._hidden.get(one, (0, none)) for one in sequences)
        each = [state if at == place else none for (at, state), place in zip(known, positions, strict=True)]
        return torch.stack(each) if each else none[None, :][:0]
