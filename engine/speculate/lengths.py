"""Computes how long a draft pays, from the time that a drafted token adds to a step and from the rate of acceptance.

A drafted token costs the time that it adds to a step, drafting included.  An accepted token saves one sequence's share
of a step without drafts.  The price is the chance of acceptance at which both are equal: the added time, divided by the
step's time without drafts per sequence.  If a token is accepted with chance c, then token i of a draft is accepted,
with all before it, with chance of about c**i.  A draft ends where this chance falls below the price.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import log, log2
from statistics import median
from weakref import WeakKeyDictionary

from rooflab.engine.sequence import Sequence

KEPT = 15
"""The number of kept step times for each class of batch sizes.  Each doubling of the size has four classes."""
RENEWED = 64
"""The number of steps with drafts after which one step runs without drafts, so that its present time is known."""
LEAST_PRICE, HIGHEST_PRICE = 0.01, 0.99
WEIGHT = 0.9
"""Each new draft multiplies the earlier counts in `Odds` by this factor."""
PAUSE, LONGEST_PAUSE = 16, 256
"""Tokens until a sequence drafts again.  This number doubles after each failed try, up to `LONGEST_PAUSE`."""


@dataclass(slots=True)
class Odds:
    """How often a sequence's latest drafts were accepted.  The first value is high."""

    length: int
    accepted: float = 1.5
    tried: float = 2.0
    """The number of drafted tokens that were compared: the accepted tokens, and the first rejected token."""
    resumes: int = 0
    """The length in tokens at which the sequence drafts again."""
    pause: int = PAUSE


class Lengths:
    """Chooses the length of each sequence's next draft, up to `most`.  Without `adapts` the length is always `most`."""

    def __init__(self, most: int, adapts: bool = True):
        self.most = most
        self.adapts = adapts
        self._odds: WeakKeyDictionary[Sequence, Odds] = WeakKeyDictionary()
        self._plain: dict[int, deque[float]] = {}
        self._added: dict[int, deque[float]] = {}
        self._since: dict[int, int] = {}
        self._idle: dict[int, int] = {}
        """For each class: `_since` counts the last steps in a row with drafts, `_idle` those without drafts."""
        self._drafts = True
        self.price = LEAST_PRICE

    def begin(self, rows: int) -> None:
        """Prepares the lengths for a step that decodes `rows` sequences.  Call `begin` before `of`."""
        if not self.adapts or not rows:
            return
        kind = int(4 * log2(rows))
        plain, added = self._plain.get(kind), self._added.get(kind)
        self._drafts = plain is not None and self._since.get(kind, 0) < RENEWED
        self.price = max(LEAST_PRICE, rows * median(added) / median(plain)) if plain and added else LEAST_PRICE
        if self.price >= 1:  # nobody drafts, but for a step now and then, which may find another price
            self._drafts = self._drafts and self._idle.get(kind, 0) >= LONGEST_PAUSE
            self.price = HIGHEST_PRICE

    @property
    def idle(self) -> bool:
        """Whether no sequence drafts in the next step."""
        return self.adapts and not self._drafts

    def of(self, sequence: Sequence) -> int:
        """Returns how many tokens `sequence` should draft now."""
        if not self.adapts:
            return self.most
        odds = self._odds.get(sequence)
        if odds is None:
            odds = self._odds[sequence] = Odds(self.most)
        return odds.length if self._drafts and len(sequence.token_ids) >= odds.resumes else 0

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Notes how many tokens of a draft were accepted."""
        odds = self._odds.get(sequence)
        if odds is None:
            return
        odds.accepted = WEIGHT * odds.accepted + accepted
        odds.tried = WEIGHT * odds.tried + accepted + (accepted < drafted)
        chance = odds.accepted / odds.tried
        odds.length = self._pays(chance)
        if odds.length:
            if odds.length == self.most:
                odds.pause = PAUSE
            return
        odds.resumes = len(sequence.token_ids) + odds.pause
        odds.pause = min(2 * odds.pause, LONGEST_PAUSE)
        odds.accepted, odds.tried, odds.length = 1.0, 2.0, 1

    def _pays(self, chance: float) -> int:
        """Returns the length at which a draft's last token still pays.  Returns 0 if not even the first token pays."""
        if chance <= 0:
            return 0
        return self.most if chance >= 1 else min(self.most, int(log(self.price) / log(chance)))

    def timed(self, rows: int, drafted: int, seconds: float) -> None:
        """Notes the time of a step without prompts that decoded `rows` sequences and verified `drafted` tokens."""
        kind = int(4 * log2(rows))
        plain = self._plain.setdefault(kind, deque(maxlen=KEPT)) if not drafted else self._plain.get(kind)
        if not drafted and plain is not None:
            plain.append(seconds)
            self._since[kind], self._idle[kind] = 0, self._idle.get(kind, 0) + 1
        elif plain:
            self._added.setdefault(kind, deque(maxlen=KEPT)).append((seconds - median(plain)) / drafted)
            self._since[kind], self._idle[kind] = self._since.get(kind, 0) + 1, 0
