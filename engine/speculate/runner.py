"""The runner of an engine that speculates: a step has a row for each token of a draft, and drafters see its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rooflab.engine.graphs import DecodeGraphs
from rooflab.engine.model_runner import Draw, ModelRunner
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.rows import DraftRows, Drafts
from rooflab.engine.step_tensors import spans_of, step_input


class SpeculativeRunner(ModelRunner):
    """Holds the drafter too, and the drafts that a step verifies."""

    def __init__(self, *about: Any):
        self.drafter = Drafter()
        self.drafts: Drafts = {}
        self._rows: DraftRows | None = None
        self._hidden = torch.empty(0)
        """The hidden states (num_drawn, H) of the last step, where the drafter reads them."""
        super().__init__(*about)

    def allocate(self, num_blocks: int) -> None:
        """As `ModelRunner`, and the drafter's pages."""
        super().allocate(num_blocks)
        self.drafter.allocate(num_blocks)

    def decode_graphs(self) -> DecodeGraphs | None:
        """As `ModelRunner`; None for a drafter that reads hidden states, because graphs give logits alone."""
        return super().decode_graphs() if self.drafter.reads == "tokens" else None

    def run(self, step: Step) -> Draw | None:
        """As `ModelRunner`; a sequence with a draft has a row for each token of it, and one more."""
        drafts = self.drafts
        rows = self._rows = DraftRows(self.batch, drafts) if drafts else None
        if rows is None:
            return super().run(step)
        logits = self.logits(step)
        sequences = [*self.batch.rows, *step.ending]
        index = np.append(rows.index, np.arange(len(self.batch), len(sequences)))
        ahead = np.append(rows.ahead, np.zeros(len(index) - len(rows.ahead), np.int64))
        settings = self.settings(step, sequences).repeated(index, lambda at, one: drafts.get(one, [])[: ahead[at]])
        positions = np.array([len(one) for one in sequences])[index] + ahead
        return self.draw(step, [sequences[at] for at in index], settings, logits, positions)

    def accept(self, tokens: Mapping[Sequence, list[int]]) -> None:
        """Takes what each sequence gets of the last draw: the next step computes the last of them."""
        counts = np.array([len(own) for own in tokens.values()], np.int64)
        if self.drafter.reads != "tokens":
            widths = np.array([len(self.drafts.get(one, ())) + 1 for one in tokens], np.int64)
            rows = self.on_device(np.cumsum(widths) - widths + counts - 1)
            self.drafter.accepted(list(tokens), counts.tolist(), self._hidden[rows])
        if self._rows is not None:
            order = np.array([one.row for one in self._rows.sequences])
            self.batch.source[order] = np.arange(len(order))
            self.batch.positions[order] += counts[: len(order)]
            self.drawn = self.on_device(np.array([own[-1] for own in tokens.values()]))

    def logits(self, step: Step) -> torch.Tensor:
        """As `ModelRunner`; the drafter then sees what it reads."""
        batch, rows, drafter, hidden = self.batch, self._rows, self.drafter, None
        plain, drafted = (slice(len(batch)), []) if rows is None else (rows.plain, rows.spans)
        inputs = step_input(batch, plain, [*drafted, *spans_of(step.chunks)], self.drawn)
        ops = self.step_ops(step)
        if self.graphs is not None and inputs.chunks is None:
            logits = self.graphs(inputs)
        elif drafter.reads == "tokens":
            logits = self.model.forward(inputs, self.cache, ops)
        else:
            drawn = inputs.drawn if drafter.reads == "all hidden states" else None
            whole = inputs if drawn is None else replace(inputs, drawn=None)
            hidden = self.model.hidden(whole, self.cache, ops)
            self._hidden = hidden if drawn is None else hidden[drawn]
            logits = ops.gemm(self._hidden, self.model.lm_head)
        drafter.follow(step, inputs, batch.rows if rows is None else rows.sequences, hidden)
        return logits

    def step_ops(self, step: Step) -> SimpleNamespace:
        """As `ModelRunner`."""
        return self.ops.step(step.num_decodes, step.num_prompt_tokens, sum(map(len, self.drafts.values())))
