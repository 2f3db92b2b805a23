"""The rows of a step that verifies drafts: one for each token of a draft and one for the token before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.sequence import Sequence as EngineSequence


class DraftRows:
    """First the rows of the batch without a draft, then those of each draft in order."""

    def __init__(self, batch: DecodeBatch):
        lengths = np.fromiter((len(one.draft) for one in batch.rows), np.int64, len(batch))
        self.plain, self.drafted = np.flatnonzero(lengths == 0), np.flatnonzero(lengths)
        self.counts = lengths[self.drafted] + 1
        """Rows of each drafted sequence."""
        row = np.repeat(self.drafted, self.counts)
        self.ahead = np.concatenate([np.zeros(len(self.plain), np.int64), ramp(self.counts)])
        """For each row how many tokens of the draft come before its logits' token."""
        self.index = np.concatenate([self.plain, row])
        """The row of the batch."""
        self.sequences = [batch.rows[one] for one in (*self.plain, *self.drafted)]

    def flat(self, batch: DecodeBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and cache slots of the drafted rows; their pages must be in the batch."""
        own = self.sequences[len(self.plain) :]
        tokens = [token for one in own for token in (one.token_ids[-1], *one.draft)]
        row, ahead = self.index[len(self.plain) :], self.ahead[len(self.plain) :]
        positions = batch.positions[row] + ahead
        pages = batch.block_table[row, positions // batch.block_size].astype(np.int64)
        return np.array(tokens), positions, pages * batch.block_size + positions % batch.block_size


def ramp(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after another."""
    return np.concatenate([np.arange(count) for count in counts], dtype=np.int64)


def accepted(sequences: Sequence[EngineSequence], drawn: Sequence[int]) -> list[list[int]]:
    """What a step draws for each sequence: its draft as far as the model draws the same tokens, and the token after it.

    `drawn` has for each sequence the token that `sample` draws in place of each token of its draft, and the one behind
    it.  Each is drawn from the logits behind the draft's tokens before it, at its own position: the token that a step
    without a draft would draw, if those before it were drawn too.  So a sequence gets the very tokens that it would get
    without speculation, whatever the draft (Daliri, Musco and Suresh, "Coupling without communication and
    drafter-invariant speculative decoding", arXiv 2408.07978).
    """
    found, row = [], 0
    for one in sequences:
        draft = one.draft
        if not draft:
            found.append([drawn[row]])
            row += 1
            continue
        same = 0
        while same < len(draft) and drawn[row + same] == draft[same]:
            same += 1
        found.append(list(drawn[row : row + same + 1]))
        row += len(draft) + 1
    return found
