"""The rows of a step that verifies drafts, and the tokens of a draft that are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.step_tensors import TokenSpan, ramp

Drafts = Mapping[EngineSequence, list[int]]
"""The tokens that may come next in some sequences of the batch; none is empty."""


class DraftRows:
    """The rows of the batch without a draft; then for each draft a row for the token before it and for each token."""

    def __init__(self, batch: DecodeBatch, drafts: Drafts):
        rows = np.array([sequence.row for sequence in drafts])
        counts = np.array([len(draft) + 1 for draft in drafts.values()])
        self.plain = np.delete(np.arange(len(batch)), rows)
        self.sequences = [*(batch.rows[row] for row in self.plain), *drafts]
        """The sequences of the batch in the order of their rows."""
        widths = np.append(np.ones_like(self.plain), counts)
        self.drawing = [self.sequences[place] for place in np.repeat(np.arange(len(widths)), widths).tolist()]
        """The sequence of each row."""
        self.ahead = ramp(widths)
        """For each row, how many tokens of the draft come before the token that the row draws."""
        self.spans: list[TokenSpan] = []
        for sequence, draft in drafts.items():
            ids, pages = sequence.token_ids, batch.block_table[sequence.row]
            self.spans.append(TokenSpan([ids[-1], *draft], len(ids) - 1, pages, len(draft) + 1))


def accepted(
    sequences: Sequence[EngineSequence], drawn: Sequence[int], drafts: Drafts
) -> dict[EngineSequence, list[int]]:
    """What a step draws for each sequence: its draft as far as the model draws the same tokens, and the token after it.

    `drawn` has, for each row of `sequences`, the token that `sample` draws in place of a token of the draft, and for
    the last row of a sequence the one behind it.  Each is drawn from the logits behind the draft's tokens before it, at
    its own position: the token that a step without a draft would draw, if those before it were drawn too.  So a
    sequence gets the very tokens that it would get without speculation, whatever the draft (Daliri, Musco and Suresh,
    "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978).
    """
    tokens, row = {}, 0
    while row < len(drawn):
        sequence, same = sequences[row], 0
        draft = drafts.get(sequence, ())
        while same < len(draft) and drawn[row + same] == draft[same]:
            same += 1
        tokens[sequence] = list(drawn[row : row + same + 1])
        row += len(draft) + 1
    return tokens
