"""The rows of a step that verifies drafts, and what is accepted of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rooflab.engine.batch import DecodeBatch
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.step_tensors import TokenSpan, ramp

Drafts = Mapping[EngineSequence, list[int]]
"""The tokens that may come next in some sequences of the batch; none is empty."""


class DraftRows:
    """First the rows of the batch without a draft; then for each draft the token before it, and its own tokens."""

    def __init__(self, batch: DecodeBatch, drafts: Drafts):
        rows = np.array([one.row for one in drafts])
        counts = np.array([len(draft) + 1 for draft in drafts.values()])
        self.plain = np.delete(np.arange(len(batch)), rows)
        self.sequences = [*(batch.rows[row] for row in self.plain), *drafts]
        """The sequences of the batch in the order of their rows."""
        widths = np.append(np.ones_like(self.plain), counts)
        self.drawing = [one for one, width in zip(self.sequences, widths.tolist(), strict=True) for _ in range(width)]
        """The sequence of each row."""
        self.ahead = ramp(widths)
        """For each row, how many tokens of the draft come before the token that the row draws."""
        self.spans = [
            TokenSpan([one.token_ids[-1], *draft], len(one.token_ids) - 1, batch.block_table[one.row], len(draft) + 1)
            for one, draft in drafts.items()
        ]


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
    found, row = {}, 0
    while row < len(drawn):
        one, same = sequences[row], 0
        draft = drafts.get(one, ())
        while same < len(draft) and drawn[row + same] == draft[same]:
            same += 1
        found[one] = list(drawn[row : row + same + 1])
        row += len(draft) + 1
    return found
