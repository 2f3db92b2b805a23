"""Drafts tokens from the text so far (prompt lookup; Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding).  A
draft copies the tokens after an earlier occurrence of the last two tokens, whose preceding tokens match best."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.lengths import Lengths

CONTEXT, TRIED = 8, 16
"""The number of compared tokens before the pair, and the number of earlier positions of the pair that are tried."""


class Places:
    """The last position of each pair of successive tokens in a sequence.  The pair at the end is not included."""

    def __init__(self) -> None:
        self.behind: dict[tuple[int, int], int] = {}
        self.older: dict[int, int] = {}
        """For each position of a pair, the position at which the same pair came before."""
        self.known = 1
        """All pairs that end before this position are indexed."""


def _alike(tokens: list[int], place: int, older: dict[int, int]) -> int:
    """Returns `place` or an earlier position of the same pair: the position with the most equal tokens before the pair.
    If several positions have equally many, returns the latest."""
    best, longest, end = place, -1, len(tokens)
    for _ in range(TRIED):
        same = 0
        while same < CONTEXT and place - 3 - same >= 0 and tokens[place - 3 - same] == tokens[end - 3 - same]:
            same += 1
        if same > longest:
            best, longest = place, same
        if same == CONTEXT or place not in older:
            break
        place = older[place]
    return best


def _index(tokens: list[int], places: Places, end: int) -> None:
    """Adds the pairs of new tokens to `places`, but not the last pair."""
    for place in range(places.known + 1, end):
        pair = (tokens[place - 2], tokens[place - 1])
        if pair in places.behind:
            places.older[place] = places.behind[pair]
        places.behind[pair] = place


class NgramDrafter(Drafter):
    """Searches the prompt and the answer of each sequence for its last two tokens."""

    def __init__(self) -> None:
        self._places: WeakKeyDictionary[EngineSequence, Places] = WeakKeyDictionary()
        self._found: dict[EngineSequence, int] = {}

    def wants(self, rows: Sequence[EngineSequence], lengths: Lengths) -> list[tuple[EngineSequence, int]]:
        """Returns the sequences whose last two tokens came before, each with the length of its draft."""
        # A loop with one call: it runs for up to 256 sequences a step, most of which find nothing.
        found = self._found = {}
        wanted: list[tuple[EngineSequence, int]] = []
        if lengths.idle:
            return wanted
        for sequence in rows:
            places = self._places.get(sequence)
            if places is None:
                places = self._places[sequence] = Places()
            tokens, behind, known = sequence.token_ids, places.behind, places.known
            end = len(tokens)
            if end - known > 1:
                _index(tokens, places, end)
            pair = (tokens[-2], tokens[-1]) if end > 1 else (-1, -1)
            place = behind.setdefault(pair, end)
            places.known = end
            if place < end:
                behind[pair], places.older[end] = end, place
                if length := lengths.of(sequence):
                    found[sequence] = _alike(tokens, place, places.older)
                    wanted.append((sequence, length))
        return wanted

    def draft(self, drafting: Sequence[tuple[EngineSequence, int]]) -> dict[EngineSequence, list[int]]:
        """Copies the tokens after the earlier pair.  At the end of the text, the draft goes on with its own tokens."""
        drafts = {}
        for sequence, most in drafting:
            place, tokens = self._found[sequence], sequence.token_ids
            draft, period = tokens[place : place + most], len(tokens) - place
            while len(draft) < most:
                draft.append(draft[-period])
            drafts[sequence] = draft
        return drafts
