"""Chooses the length of drafts from the cost of a drafted token and the acceptance rate.

A step without drafts takes the time `step_time`, and gives one token to each of `sequences` sequences. So an accepted
token saves the time `step_time / sequences`.

A drafted token costs its draft time and the time that it adds to a step. Its price is this cost over the saved time.

The first `i` tokens are all accepted with the chance `c**i`, if each token has the chance `c`. A draft ends where
`c**i` falls below the price.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from math import log, log2
from statistics import median
from weakref import WeakKeyDictionary

from rooflab.engine.sequence import Sequence

KEPT_TIMES = 15
"""The number of kept step times for each class of batch sizes.  Each doubling of the size has four classes."""
MAX_DRAFT_STEPS = 64
"""The number of steps with drafts after which one step runs without drafts, so that its present time is known."""
LEAST_PRICE, HIGHEST_PRICE = 0.01, 0.99
DECAY_FACTOR = 0.9
"""Each new draft multiplies the earlier counts in `Odds` by this factor."""
PAUSE_TOKENS, LONGEST_PAUSE = 16, 256
"""Tokens until a sequence drafts again.  This number doubles after each failed try, up to `LONGEST_PAUSE`."""


@dataclass(slots=True)
class Odds:
    """Counts the accepted tokens in the latest drafts of a sequence.  Starts as if 1.5 of 2 tokens were accepted."""

    length: int
    accepted: float = 1.5
    tried: float = 2.0
    """The number of drafted tokens that were compared: the accepted tokens, and the first rejected token."""
    resumes: int = 0
    """The length in tokens at which the sequence drafts again."""
    pause: int = PAUSE_TOKENS


class Lengths:
    """Chooses the length of each sequence's next draft, at most `most`."""

    def __init__(self, most: int):
        self.most = most
        self._odds: WeakKeyDictionary[Sequence, Odds] = WeakKeyDictionary()
        self._plain: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))
        self._added: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))
        self._since: defaultdict[int, int] = defaultdict(int)
        self._idle: defaultdict[int, int] = defaultdict(int)
        """For each class: `_since` counts the last steps in a row with drafts, `_idle` those without drafts."""
        self._drafts = True
        self.price = LEAST_PRICE

    def begin(self, rows: int) -> None:
        """Prepares a step that decodes `rows` sequences.  Then `of` returns the draft lengths of this step."""
        if not rows:
            return
        bucket = int(4 * log2(rows))
        step_s, token_s = self._plain[bucket], self._added[bucket]
        self._drafts = bool(step_s) and self._since[bucket] < MAX_DRAFT_STEPS
        self.price = max(LEAST_PRICE, rows * median(token_s) / median(step_s)) if step_s and token_s else LEAST_PRICE
        if self.price >= 1:  # nobody drafts, but for a step now and then, which may find another price
            self._drafts = self._drafts and self._idle[bucket] >= LONGEST_PAUSE
            self.price = HIGHEST_PRICE

    @property
    def idle(self) -> bool:
        """Returns whether no sequence drafts in the next step."""
        return not self._drafts

    def of(self, sequence: Sequence) -> int:
        """Returns how many tokens `sequence` should draft now."""
        draft_odds = self._odds.get(sequence)
        if draft_odds is None:
            draft_odds = self._odds[sequence] = Odds(self.most)
        return draft_odds.length if self._drafts and len(sequence.token_ids) >= draft_odds.resumes else 0

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records that the model accepted `accepted` of the `drafted` tokens of a draft."""
        draft_odds = self._odds[sequence]
        draft_odds.accepted = DECAY_FACTOR * draft_odds.accepted + accepted
        draft_odds.tried = DECAY_FACTOR * draft_odds.tried + accepted + (accepted < drafted)
        acceptance_rate = draft_odds.accepted / draft_odds.tried
        draft_odds.length = self._pays(acceptance_rate)
        if draft_odds.length:
            if draft_odds.length == self.most:
                draft_odds.pause = PAUSE_TOKENS
            return
        draft_odds.resumes = len(sequence.token_ids) + draft_odds.pause
        draft_odds.pause = min(2 * draft_odds.pause, LONGEST_PAUSE)
        draft_odds.accepted, draft_odds.tried, draft_odds.length = 1.0, 2.0, 1

    def _pays(self, chance: float) -> int:
        """Returns the longest draft length that saves time, or 0. `chance` is a drafted token's acceptance rate."""
        if chance <= 0:
            return 0
        return self.most if chance >= 1 else min(self.most, int(log(self.price) / log(chance)))

    def timed(self, rows: int, drafted: int, seconds: float) -> None:
        """Records the time of a step without prompts that decoded `rows` sequences and verified `drafted` tokens."""
        bucket = int(4 * log2(rows))
        step_s = self._plain[bucket]
        if not drafted:
            step_s.append(seconds)
            self._since[bucket], self._idle[bucket] = 0, self._idle[bucket] + 1
        elif step_s:
            self._added[bucket].append((seconds - median(step_s)) / drafted)
            self._since[bucket], self._idle[bucket] = self._since[bucket] + 1, 0
