"""Drafts by a smaller model, or by the model's own first layers, one token after another (Leviathan et al., arXiv
2211.17192; the first layers alone: Elhoushi et al., "LayerSkip", arXiv 2404.16710)."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rooflab.engine.model import KVCache, Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.sampling import SamplingTensors
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.runner import SpeculativeRunner


def by_sequence(sequences: Sequence[EngineSequence], drawn: Sequence[torch.Tensor]) -> dict[EngineSequence, list[int]]:
    """Drafts of tokens that were drawn place by place, for the sequences that have that place, which come first."""
    drafts: dict[EngineSequence, list[int]] = {one: [] for one in sequences}
    for ids in drawn:
        for draft, token in zip(drafts.values(), ids.tolist(), strict=False):  # the shorter drafts have ended
            draft.append(token)
    return drafts


class Chain(Drafter, ABC):
    """Drafts a token from the token before it, with keys and values in pages of the same numbers as the model's.

    A drafted token is drawn with its request's settings, seed and position, so that the model's draw, which has the
    same noise, is the likelier to agree; penalties and biases are left to the model.
    """

    def __init__(self, runner: SpeculativeRunner, ops: OpSet | None = None):
        self.runner = runner
        self._ops = ops

    @property
    def ops(self) -> OpSet:
        """The drafter's kernels, or else the model's."""
        return self._ops or self.runner.ops

    def ops_of(self, inputs: StepInput) -> SimpleNamespace:
        """The kernels for all tokens of a step."""
        n = len(inputs.seq_lens)
        return self.ops.step(n, len(inputs.token_ids) - n)

    def draft(self, drafting: Sequence[tuple[EngineSequence, int]]) -> dict[EngineSequence, list[int]]:
        """Drafts for all sequences at once; the longest drafts end last."""
        drafting = sorted(drafting, key=lambda pair: -pair[1])
        sequences, counts = [one for one, _ in drafting], np.array([most for _, most in drafting])
        batch, size = self.runner.batch, self.runner.block_size
        rows = np.array([one.row for one in sequences])
        tokens = self._to(np.array([one.token_ids[-1] for one in sequences]))
        sampling, state, drawn = SamplingTensors(sequences, self.runner.device, False), self.begin(sequences), []
        for place in range(int(counts[0])):
            n = int((counts > place).sum())
            if n < len(tokens):
                sampling = SamplingTensors(sequences[:n], self.runner.device, False)
            positions = batch.positions[rows[:n]] + place
            table = batch.block_table[rows[:n], : int(batch.num_blocks[rows[:n]].max())]
            slots = table[np.arange(n), positions // size].astype(np.int64) * size + positions % size
            lens = (positions + 1).astype(np.int32)
            places = self._to(positions), self._to(slots), self._to(table), self._to(lens)
            inputs = StepInput(tokens[:n], *places)
            ops = self.ops.step(n)
            logits, state = self.forward(inputs, ops, state[:n])
            tokens = sampling.sample(ops.sample, logits, self._to(positions + 1))[0]
            drawn.append(tokens)
        return by_sequence(sequences, drawn)

    def begin(self, sequences: Sequence[EngineSequence]) -> Any:
        """What `forward` takes beside the first tokens, a row for each sequence."""
        return np.empty((len(sequences), 0))

    @abstractmethod
    def forward(self, inputs: StepInput, ops: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Logits (rows, vocab_size) of the next tokens, and the next `state`."""

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return self.runner.on_device(array)


class ModelDrafter(Chain):
    """A model of the same vocabulary, which also computes what the model computes, to have its keys and values."""

    def __init__(self, runner: SpeculativeRunner, model: Model, ops: OpSet):
        super().__init__(runner, ops)
        self.model = model
        self.cache = KVCache([], [])

    def allocate(self, num_blocks: int) -> None:
        """Makes the drafter's KV cache, with this number of pages."""
        self.cache = self.runner.new_cache(self.model.arch, num_blocks)

    def forward(self, inputs: StepInput, ops: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """As `Chain`."""
        return self.model.forward(inputs, self.cache, ops), state

    def follow(
        self, step: Step, inputs: StepInput, decoding: Sequence[EngineSequence], hidden: torch.Tensor | None
    ) -> None:
        """Writes keys and values of all tokens of the step: those of prompts, of rows that did not draft, and of the
        last token of each draft, which the drafter has only drawn."""
        one = self._to(np.zeros(1, np.int64))  # hidden states behind the last layer are not needed
        self.model.hidden(replace(inputs, drawn=one), self.cache, self.ops_of(inputs))


class LayersDrafter(Chain):
    """The model's own first layers and its head; their keys and values are the model's own."""

    def __init__(self, runner: SpeculativeRunner, layers: int):
        super().__init__(runner)
        self.model = copy.copy(runner.model)
        self.model.layers = runner.model.layers[:layers]

    def forward(self, inputs: StepInput, ops: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """As `Chain`."""
        return self.model.forward(inputs, self.runner.cache, ops), state
