"""Runs the model with drafts.  A step has a row for each drafted token.  A drafter may read the hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rooflab.engine.graphs import DecodeGraphs, DecodeReplays
from rooflab.engine.model_runner import Draw, ModelRunner
from rooflab.engine.sampling import SamplingTensors, on_device
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.rows import DraftRows, Drafts
from rooflab.engine.step_tensors import spans_of, step_input


class SpeculativeRunner(ModelRunner):
    """Extends `ModelRunner` with a drafter and with the drafts that a step verifies."""

    def __init__(self, *about: Any):
        self.drafter = Drafter()
        self.drafts: Drafts = {}
        self._rows: DraftRows | None = None
        self._hidden = torch.empty(0)
        """The hidden states (num_drawn, H) of the last step, if the drafter reads hidden states."""
        super().__init__(*about)

    def allocate(self, num_blocks: int) -> None:
        """Replaces the KV caches of the model and the drafter with new caches of `num_blocks` pages."""
        super().allocate(num_blocks)
        self.drafter.allocate(num_blocks)

    def decode_graphs(self) -> DecodeGraphs | DecodeReplays | None:
        """Returns `ModelRunner`'s graphs, or None if the drafter reads hidden states, which graphs do not return."""
        return None if self.drafter.reads_hidden else super().decode_graphs()

    def run(self, step: Step) -> Draw | None:
        """Runs `step` as `ModelRunner` does.  A sequence with a draft of `n` tokens has `n + 1` rows."""
        drafts = self.drafts
        rows = self._rows = DraftRows(self.batch, drafts) if drafts else None
        if rows is None:
            return super().run(step)
        logits = self.logits(step)
        sequences = rows.drawing + step.ending
        ahead = np.append(rows.ahead, np.zeros(len(step.ending), np.int64))
        sampling = SamplingTensors(sequences, self.device, lambda row: drafts.get(sequences[row], [])[: ahead[row]])
        return self.draw(step, sequences, sampling, logits, np.array([len(sequence) for sequence in sequences]) + ahead)

    def accept(self, tokens: Mapping[Sequence, list[int]]) -> None:
        """Takes the new tokens of each sequence.  The last new token is an input of the next step."""
        token_counts = np.array([len(new_tokens) for new_tokens in tokens.values()], np.int64)
        if self.drafter.reads_hidden:
            row_counts = np.array([len(self.drafts.get(sequence, ())) + 1 for sequence in tokens], np.int64)
            last_token_rows = on_device(np.cumsum(row_counts) - row_counts + token_counts - 1, self.device)
            self.drafter.accepted(list(tokens), token_counts.tolist(), self._hidden[last_token_rows])
        if self._rows is not None:
            row_order = np.array([sequence.row for sequence in self._rows.sequences])
            self.batch.source[row_order] = np.arange(len(row_order))
            self.batch.positions[row_order] += token_counts[: len(row_order)]
            self.batch.changed = True
            self.drawn = on_device(np.array([new_tokens[-1] for new_tokens in tokens.values()]), self.device)

    def logits(self, step: Step) -> torch.Tensor:
        """Runs the model, gives the drafter inputs and hidden states, and returns logits `[num_drawn, vocab_size]`."""
        batch, rows, drafter, hidden_states = self.batch, self._rows, self.drafter, None
        batch_rows, draft_spans = (slice(len(batch)), []) if rows is None else (rows.plain, rows.spans)
        inputs = step_input(batch, batch_rows, [*draft_spans, *spans_of(step.chunks)], self.drawn)
        ops = self.step_ops(step)
        replayed_logits = self.replayed(step) if rows is None else None
        if replayed_logits is not None:
            logits = replayed_logits
        elif isinstance(self.graphs, DecodeGraphs) and inputs.chunks is None:
            logits = self.graphs(inputs)
        elif not drafter.reads_hidden:
            logits = self.model.forward(inputs, self.cache, ops)
        else:
            hidden_states = self.model.hidden(replace(inputs, drawn=None), self.cache, ops)
            self._hidden = hidden_states if inputs.drawn is None else hidden_states[inputs.drawn]
            logits = ops.gemm(self._hidden, self.model.lm_head)
        drafter.follow(step, inputs, batch.rows if rows is None else rows.sequences, hidden_states)
        return logits

    def step_ops(self, step: Step) -> SimpleNamespace:
        """Returns the kernels for `step`, which depend on its number of rows. Each drafted token adds one row."""
        return self.ops.step(step.num_decodes, step.num_prompt_tokens, sum(map(len, self.drafts.values())))
