"""Drafts tokens from the text so far (prompt lookup; Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding).
Finds the last two tokens in earlier text.  Copies the tokens after the occurrence with the best matching context.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.lengths import Lengths

CONTEXT_TOKENS, MAX_TRIES = 8, 16
"""The number of compared tokens before the pair, and the number of earlier positions of the pair that are tried."""


class Places:
    """Maps each pair of successive tokens in a sequence to the position behind its latest occurrence."""

    def __init__(self) -> None:
        self.behind: dict[tuple[int, int], int] = {}
        self.older: dict[int, int] = {}
        """For each position of a pair, the position at which the same pair came before."""
        self.known = 1
        """All pairs that end before this position are indexed."""


def _alike(tokens: list[int], place: int, older: dict[int, int]) -> int:
    """Returns the position after the earlier occurrence of the last two tokens with the longest equal text before it.

    `place` is the position after the latest occurrence. `older` maps such a position to the next older position."""
    best_position, longest_match, end = place, -1, len(tokens)
    for _ in range(MAX_TRIES):
        count = 0
        while (
            count < CONTEXT_TOKENS and place - 3 - count >= 0 and tokens[place - 3 - count] == tokens[end - 3 - count]
        ):
            count += 1
        if count > longest_match:
            best_position, longest_match = place, count
        if count == CONTEXT_TOKENS or place not in older:
            break
        place = older[place]
    return best_position


def _index(tokens: list[int], places: Places, end: int) -> None:
    """Adds each new pair of successive tokens to the index `places`, except the last, which no token follows yet."""
    for position in range(places.known + 1, end):
        token_pair = (tokens[position - 2], tokens[position - 1])
        if token_pair in places.behind:
            places.older[position] = places.behind[token_pair]
        places.behind[token_pair] = position


class NgramDrafter(Drafter):
    """Drafts from an earlier occurrence of a sequence's last two tokens, in its prompt or its answer."""

    def __init__(self) -> None:
        self._places: WeakKeyDictionary[EngineSequence, Places] = WeakKeyDictionary()
        self._found: dict[EngineSequence, int] = {}

    def wants(self, rows: Sequence[EngineSequence], lengths: Lengths) -> list[tuple[EngineSequence, int]]:
        """Returns the sequences in which the last two tokens occurred before, each with the length of its draft."""
        # A loop with one call: it runs for up to 256 sequences a step, most of which find nothing.
        found_positions = self._found = {}
        draft_requests: list[tuple[EngineSequence, int]] = []
        if lengths.idle:
            return draft_requests
        for sequence in rows:
            pair_index = self._places.get(sequence)
            if pair_index is None:
                pair_index = self._places[sequence] = Places()
            tokens, position_of, index_end = sequence.token_ids, pair_index.behind, pair_index.known
            num_tokens = len(tokens)
            if num_tokens - index_end > 1:
                _index(tokens, pair_index, num_tokens)
            token_pair = (tokens[-2], tokens[-1]) if num_tokens > 1 else (-1, -1)
            position = position_of.setdefault(token_pair, num_tokens)
            pair_index.known = num_tokens
            if position < num_tokens:
                position_of[token_pair], pair_index.older[num_tokens] = num_tokens, position
                if draft_length := lengths.of(sequence):
                    found_positions[sequence] = _alike(tokens, position, pair_index.older)
                    draft_requests.append((sequence, draft_length))
        return draft_requests

    def draft(self, drafting: Sequence[tuple[EngineSequence, int]]) -> dict[EngineSequence, list[int]]:
        """Drafts tokens for each sequence.  Copies the tokens that follow an earlier occurrence of the sequence's last
        two tokens.  If the sequence has too few tokens there, repeats them."""
        drafts = {}
        for sequence, draft_length in drafting:
            position, tokens = self._found[sequence], sequence.token_ids
            draft_tokens, period = tokens[position : position + draft_length], len(tokens) - position
            while len(draft_tokens) < draft_length:
                draft_tokens.append(draft_tokens[-period])
            drafts[sequence] = draft_tokens
        return drafts
