"""Finds stop texts in an answer while the answer grows.  A stop text may span several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rooflab.engine.load.pieces import TextStream


class StopText:
    """Builds the text of an answer, and cuts it before the first complete stop text.

    If the answer contains several stop texts, the text that ends first counts.  If two end together, the longer text
    counts.  No stop text counts in the first `min_tokens` tokens."""

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
        """Adds a token and returns the new text.  With `last=True` no text is held back for later tokens."""
        if not self.stopped:
            self.push(token_id)
        if last:
            self.end()
        return self.take(last)

    def end(self) -> None:
        """Ends the stream of tokens.  If there was no stop text, adds the text of an incomplete last character."""
        if not self.stopped:
            self._add(self._stream.flush())

    def take(self, last: bool) -> str:
        """Returns the text since the last call.  With `last=False` holds back a possible beginning of a stop text."""
        tail_length = 0
        if not last and not self.stopped:
            text, unsent_length = self.text, len(self.text) - self._shown  # what was shown begins no stop text
            for stop_text in self._stops:
                prefix_sizes = range(min(len(stop_text) - 1, unsent_length), tail_length, -1)
                tail_length = next((size for size in prefix_sizes if text.endswith(stop_text[:size])), tail_length)
        new_text = self.text[self._shown : len(self.text) - tail_length]
        self._shown += len(new_text)
        return new_text

    def _add(self, piece: str) -> bool:
        old_length = len(self.text)
        self.text += piece
        stop_matches = []
        for stop_text in self._stops if self._left < 0 else ():
            match_start = self.text.find(stop_text, max(0, old_length - len(stop_text) + 1))
            if match_start >= 0:
                stop_matches.append((match_start + len(stop_text), match_start))
        if stop_matches:
            self.text = self.text[: min(stop_matches)[1]]
            self.stopped = True
        return self.stopped
