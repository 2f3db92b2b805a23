"""Drafts from the text so far: what followed its last two tokens the last time (prompt lookup; Saxena, 2023,
github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

from collections.abc import Sequence

from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.lengths import Lengths
from rooflab.engine.speculate.state import Places


class NgramDrafter(Drafter):
    """Looks the last two tokens of each sequence up in its prompt and its answer."""

    def __init__(self) -> None:
        self._found: dict[EngineSequence, int] = {}

    def wants(self, rows: Sequence[EngineSequence], lengths: Lengths) -> list[tuple[EngineSequence, int]]:
        """The sequences whose last two tokens came before, each with the length of its draft."""
        # A loop without calls: it runs for up to 256 sequences a step, most of which find nothing.
        found = self._found = {}
        wanted = []
        for one in rows:
            places = one.places
            if places is None:
                places = one.places = Places()
            tokens, behind, known = one.token_ids, places.behind, places.known
            end = len(tokens)
            if end - known > 1:
                behind.update(zip(zip(tokens[known - 1 :], tokens[known : end - 1]), range(known + 1, end)))  # noqa: B905
            pair = (tokens[-2], tokens[-1]) if end > 1 else (-1, -1)
            place = behind.get(pair)
            behind[pair] = end
            places.known = end
            if place is not None and place < end and (length := lengths.of(one)):
                found[one] = place
                wanted.append((one, length))
        return wanted

    def draft(self, step: Step) -> None:
        """Copies what followed; where that reaches the end of the text, the draft goes on with itself."""
        for one, most in step.drafting:
            place, tokens = self._found[one], one.token_ids
            draft, period = tokens[place : place + most], len(tokens) - place
            while len(draft) < most:
                draft.append(draft[-period])
            one.draft = draft
