"""Builds the rows of a step that verifies drafts, and decides which drafted tokens are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.step_tensors import TokenSpan, ramp

Drafts = Mapping[EngineSequence, list[int]]
"""The drafted tokens of some sequences of the batch.  No draft is empty."""


class DraftRows:
    """Orders the rows of a step.  Rows without a draft come first.  Then each draft of `n` tokens has `n + 1` rows."""

    def __init__(self, batch: DecodeBatch, drafts: Drafts):
        batch_rows = np.array([sequence.row for sequence in drafts])
        row_counts = np.array([len(draft) + 1 for draft in drafts.values()])
        self.plain = np.delete(np.arange(len(batch)), batch_rows)
        self.sequences = [*(batch.rows[row] for row in self.plain), *drafts]
        """The sequences of the batch, in the order of their rows."""
        all_row_counts = np.append(np.ones_like(self.plain), row_counts)
        self.drawing = [self.sequences[i] for i in np.repeat(np.arange(len(all_row_counts)), all_row_counts).tolist()]
        """The sequence of each row."""
        self.ahead = ramp(all_row_counts)
        """For each row, the number of drafted tokens before the token that the row draws."""
        self.spans: list[TokenSpan] = []
        for sequence, draft in drafts.items():
            token_ids, pages = sequence.token_ids, batch.block_table[sequence.row]
            self.spans.append(TokenSpan([token_ids[-1], *draft], len(token_ids) - 1, pages, len(draft) + 1))


def accepted(
    sequences: Sequence[EngineSequence], drawn: Sequence[int], drafts: Drafts
) -> dict[EngineSequence, list[int]]:
    """Returns each sequence's new tokens: the accepted drafted tokens, and the model's next token.

    `sequences` holds the sequence of each row of the step, and `drawn` the token that the model draws there.  A drafted
    token is accepted if the model draws it and all drafted tokens before it. So drafts never change the output (Daliri,
    Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978)."""
    tokens, row = {}, 0
    while row < len(drawn):
        sequence, num_accepted = sequences[row], 0
        draft = drafts.get(sequence, ())
        while num_accepted < len(draft) and drawn[row + num_accepted] == draft[num_accepted]:
            num_accepted += 1
        tokens[sequence] = list(drawn[row : row + num_accepted + 1])
        row += len(draft) + 1
    return tokens
