"""How long a draft pays: by the time that a drafted token adds to a step, and by how often drafts were accepted.

A drafted token costs the time that it adds to a step, drafting included.  An accepted one saves a token's share of a
step without drafts.  So its price is the chance of acceptance at which it breaks even: the time that it adds, over the
step's time without drafts for each sequence.  The i-th token of a draft is accepted with those before it, with chance c
about c**i; a draft ends where that falls below the price.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import log, log2
from statistics import median
from weakref import WeakKeyDictionary

from rooflab.engine.sequence import Sequence

KEPT = 15
"""Times of steps that are kept for each class of batch sizes; each doubling of the size has four classes."""
RENEWED = 64
"""Steps with drafts after which one runs without, so that its present time is known."""
LEAST_PRICE, HIGHEST_PRICE = 0.01, 0.99
WEIGHT = 0.9
"""The weight of the earlier counts in `Odds`, at each draft."""
PAUSE, LONGEST_PAUSE = 16, 256
"""Tokens until a sequence drafts again, at first, and after each try that failed twice as many, up to the longest."""


@dataclass(slots=True)
class Odds:
    """How often a sequence's last drafts were accepted; it begins with a high chance."""

    length: int
    accepted: float = 1.5
    tried: float = 2.0
    """Drafted tokens that were compared: the accepted ones, and the first that was not."""
    resumes: int = 0
    """The number of tokens at which the sequence drafts again."""
    pause: int = PAUSE


class Lengths:
    """The length of each sequence's next draft, up to `most`; always `most` if it does not adapt."""

    def __init__(self, most: int, adapts: bool = True):
        self.most = most
        self.adapts = adapts
        self._odds: WeakKeyDictionary[Sequence, Odds] = WeakKeyDictionary()
        self._plain: dict[int, deque[float]] = {}
        self._added: dict[int, deque[float]] = {}
        self._since: dict[int, int] = {}
        self._idle: dict[int, int] = {}
        """By class: `_since` counts steps with drafts since the last without, `_idle` the other way round."""
        self._drafts = True
        self.price = LEAST_PRICE

    def begin(self, rows: int) -> None:
        """Says how many sequences the next step decodes; call it before `of`."""
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
        """Whether nobody drafts in the next step."""
        return self.adapts and not self._drafts

    def of(self, sequence: Sequence) -> int:
        """How many tokens `sequence` should draft now."""
        if not self.adapts:
            return self.most
        odds = self._odds.get(sequence)
        if odds is None:
            odds = self._odds[sequence] = Odds(self.most)
        return odds.length if self._drafts and len(sequence.token_ids) >= odds.resumes else 0

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Notes how much of a draft was accepted."""
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
        """The length at which a draft's last token still pays; 0 if the first does not."""
        if chance <= 0:
            return 0
        return self.most if chance >= 1 else min(self.most, int(log(self.price) / log(chance)))

    def timed(self, rows: int, drafted: int, seconds: float) -> None:
        """Notes the time of a step that decoded `rows` sequences and verified `drafted` tokens, and no prompt."""
        kind = int(4 * log2(rows))
        plain = self._plain.setdefault(kind, deque(maxlen=KEPT)) if not drafted else self._plain.get(kind)
        if not drafted and plain is not None:
            plain.append(seconds)
            self._since[kind], self._idle[kind] = 0, self._idle.get(kind, 0) + 1
        elif plain:
            self._added.setdefault(kind, deque(maxlen=KEPT)).append((seconds - median(plain)) / drafted)
            self._since[kind], self._idle[kind] = self._since.get(kind, 0) + 1, 0
