"""Texts that end an answer, found in the text as it grows, wherever tokens cut it."""

from __future__ import annotations

from collections.abc import Sequence

from rooflab.engine.load.pieces import TextStream


class StopText:
    """The text of an answer up to the first stop text that is complete; the stop text is left out.

    What one or several tokens add makes no difference: of the stop texts that the answer contains, the one that ends
    first counts, and of two that end together the longer one.  Within the first `min_tokens` tokens none counts.
    """

    def __init__(self, stops: Sequence[str], stream: TextStream, min_tokens: int = 0):
        self._stops = tuple(stops)
        self._stream = stream
        self._left = min_tokens
        self._shown = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Adds a token, and returns whether a stop text is complete."""
        self._left -= 1
        return self._add(self._stream.push(token_id))

    def piece(self, token_id: int, last: bool) -> str:
        """Adds a token of the answer, and returns the text that is new with it; the `last` token holds nothing back."""
        if not self.stopped:
            self.push(token_id)
        if last:
            self.end()
        return self.take(last)

    def end(self) -> None:
        """Adds what the last tokens held back, when the answer ends without a stop text."""
        if not self.stopped:
            self._add(self._stream.flush())

    def take(self, last: bool) -> str:
        """The text that is new since the last call; what may be the beginning of a stop text waits until `last`."""
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
