"""Finds the texts that end an answer while the answer grows, even where a stop text spans several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rooflab.engine.load.pieces import TextStream


class StopText:
    """The text of an answer up to the first complete stop text, which is left out.

    The result does not depend on how tokens divide the text.  If the answer contains several stop texts, the text that
    ends first counts.  If two end together, the longer text counts.  No stop text counts in the first `min_tokens`
    tokens."""

    def __init__(self, stops: Sequence[str], stream: TextStream, min_tokens: int = 0):
        self._stops = tuple(stops)
        self._stream = stream
        self._left = min_tokens
        self._shown = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Adds a token.  Returns whether a stop text is complete."""
        self._left -= 1
        return self._add(self._stream.push(token_id))

    def piece(self, token_id: int, last: bool) -> str:
        """Adds a token of the answer and returns the new text.  With the `last` token no text is held back any more."""
        if not self.stopped:
            self.push(token_id)
        if last:
            self.end()
        return self.take(last)

    def end(self) -> None:
        """Adds the text that the last tokens held back, if the answer ends without a stop text."""
        if not self.stopped:
            self._add(self._stream.flush())

    def take(self, last: bool) -> str:
        """Returns the new text since the last call.  Holds back a possible beginning of a stop text until `last`."""
        held = 0
        if not last and not self.stopped:
            text, hidden = self.text, len(self.text) - self._shown  # what was shown begins no stop text
            for stop in self._stops:
                sizes = range(min(len(stop) - 1, hidden), held, -1)
                held = next((size for size in sizes if text.endswith(stop[:size])), held)
        new = self.text[self._shown : len(self.text) - held]
        self._shown += len(new)
        return new

    def _add(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        ends = []
        for stop in self._stops if self._left < 0 else ():
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), at))
        if ends:
            self.text = self.text[: min(ends)[1]]
            self.stopped = True
        return self.stopped
