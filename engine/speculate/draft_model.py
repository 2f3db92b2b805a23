"""Drafts tokens with a smaller model, one token after another (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rooflab.engine.model import KVCache, Model, StepInput
from rooflab.engine.ops import OpSet
from rooflab.engine.sampling import SamplingTensors, on_device
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.runner import SpeculativeRunner


class ModelDrafter(Drafter):
    """Drafts tokens one after another with a smaller model of the same vocabulary.  This model computes every token, to
    fill its KV cache, which uses the page numbers of the large model's KV cache.

    A drafted token is drawn with the random numbers that the model later uses at the same position.  So both draws
    agree more often.  Only the model applies penalties and biases."""

    def __init__(self, runner: SpeculativeRunner, model: Model, ops: OpSet):
        self.runner = runner
        self.model = model
        self.ops = ops
        self.cache = KVCache([], [])

    def allocate(self, num_blocks: int) -> None:
        """Allocates the drafter's KV cache with `num_blocks` pages."""
        self.cache = self.runner.new_cache(self.model.arch, num_blocks)

    def ops_of(self, inputs: StepInput) -> SimpleNamespace:
        """Returns the drafter's kernels for a step that computes all tokens of `inputs`."""
        n = len(inputs.seq_lens)
        return self.ops.step(n, len(inputs.token_ids) - n)

    def draft(self, drafting: Sequence[tuple[EngineSequence, int]]) -> dict[EngineSequence, list[int]]:
        """Drafts for all sequences at once.  Short drafts end first, and longer drafts go on with fewer rows."""
        drafting = sorted(drafting, key=lambda pair: -pair[1])
        sequences, draft_lengths = [sequence for sequence, _ in drafting], np.array([count for _, count in drafting])
        batch, page_size, device = self.runner.batch, self.runner.block_size, self.runner.device
        batch_rows = np.array([sequence.row for sequence in sequences])
        to_device = partial(on_device, device=device)
        tokens = to_device(np.array([sequence.token_ids[-1] for sequence in sequences]))
        sampling, state = SamplingTensors(sequences, device, edits=False), self.begin(sequences)
        step_tokens: list[torch.Tensor] = []
        for step_index in range(int(draft_lengths[0])):
            n = int((draft_lengths > step_index).sum())
            if n < len(tokens):
                sampling = SamplingTensors(sequences[:n], device, edits=False)
            positions = batch.positions[batch_rows[:n]] + step_index
            table = batch.block_table[batch_rows[:n], : int(batch.num_blocks[batch_rows[:n]].max())]
            slots = table[np.arange(n), positions // page_size].astype(np.int64) * page_size + positions % page_size
            lengths = (positions + 1).astype(np.int32)
            inputs = StepInput(tokens[:n], to_device(positions), to_device(slots), to_device(table), to_device(lengths))
            ops = self.ops.step(n)
            logits, state = self.forward(inputs, ops, state[:n])
            tokens = sampling.sample(ops.sample, logits, to_device(positions + 1))[0]
            step_tokens.append(tokens)
        drafts: dict[EngineSequence, list[int]] = {sequence: [] for sequence in sequences}
        for tokens in step_tokens:  # read at the end, so that the device does not wait for the host after each token
            for draft, token in zip(drafts.values(), tokens.tolist(), strict=False):  # the shorter drafts have ended
                draft.append(token)
        return drafts

    def begin(self, sequences: Sequence[EngineSequence]) -> Any:
        """Returns the drafter's state before its first token, one row per sequence. `forward` gets the state and
        returns the new state after each token. By default, the rows are empty."""
        return np.empty((len(sequences), 0))

    def forward(self, inputs: StepInput, ops: Any, state: Any) -> tuple[torch.Tensor, Any]:
        """Computes one step of the draft model.  Returns the logits `[rows, vocab_size]` of the next tokens, and
        `state` unchanged.  This model keeps all its data in its KV cache and needs no `state`."""
        return self.model.forward(inputs, self.cache, ops), state

    def follow(
        self, step: Step, inputs: StepInput, decoding: Sequence[EngineSequence], hidden: torch.Tensor | None
    ) -> None:
        """Runs the draft model on all tokens of the step, and writes their keys and values to its cache. The cache
        lacks some of them: prompts, tokens of sequences without a draft, and the last token of each draft."""
        row_index = torch.zeros(1, dtype=torch.int64, device=self.runner.device)
        inputs = replace(inputs, drawn=row_index)  # hidden states behind the last layer are not needed
        self.model.hidden(inputs, self.cache, self.ops_of(inputs))
