"""Converts a token to its bytes, and a stream of tokens to text.

A streamed answer has the same text as an answer in one piece. In invalid UTF-8, each incomplete character becomes one
replacement character, as Unicode advises (chapter 3.9). The package `tokenizers` is different: a single wrong byte
makes it replace all bytes of the run around it. A stream cannot do this, because it has already sent the first bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """Maps a token id to the token's bytes, as the tokenizer's own decoder does.  Special tokens have no bytes."""

    def __init__(self, tokenizer: Any, byte_of: Mapping[str, int]):
        rust_backend = tokenizer.backend_tokenizer
        decoder_config = json.loads(rust_backend.to_str())["decoder"] or {"type": "Fuse"}
        decoder_steps = decoder_config["decoders"] if decoder_config["type"] == "Sequence" else [decoder_config]
        self._token = rust_backend.id_to_token
        self._special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._replaced: list[tuple[str, str]] = []
        self._byte_of = byte_of
        """Maps each character of a byte-level vocabulary (GPT-2) to its byte."""
        self._fallback = self._by_bytes = False
        self.leading = 0
        """How many leading spaces of a text are part of the first token but not of the text."""
        for decoder_step in decoder_steps:
            self._read(decoder_step)
        self._known: dict[int, bytes] = {}

    def _read(self, step: Mapping[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._by_bytes = True
            case {"type": "ByteFallback"}:
                self._fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replaced.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                self.leading = start
            case _:
                raise ValueError(f"model: a tokenizer with the decoder {step} is not known yet")

    def __call__(self, token: int) -> bytes:
        """Returns the bytes of the token with id `token`.  The result is empty for a special token or an unknown id."""
        token_bytes = self._known.get(token)
        if token_bytes is None:
            token_bytes = self._known[token] = b"" if token in self._special else self._bytes(self._token(token) or "")
        return token_bytes

    def _bytes(self, text: str) -> bytes:
        if self._by_bytes:
            return bytes(map(self._byte_of.__getitem__, text)) if self._byte_of.keys() >= set(text) else text.encode()
        if self._fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        for old_text, new_text in self._replaced:
            text = text.replace(old_text, new_text)
        return text.encode()


class TextStream:
    """Converts arriving tokens to text.  `push` returns the text that a token completes; `flush` returns the rest.

    A character of several tokens is returned when it is complete, or when its bytes turn out to be invalid."""

    def __init__(self, piece: Callable[[int], bytes], leading: int = 0):
        self._piece, self._leading, self._length = piece, leading, 0
        self.begin = 0
        """The position in the text where the last token begins.  Inside a character, the character's position."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Adds a token and returns the new text.  The text is empty while a character is incomplete."""
        token_bytes, pending_bytes = self._piece(token_id), self._decoder.getstate()[0]
        first_text = self._decoder.decode(token_bytes[:1])
        # Where the byte does not continue what is held back, that becomes a character of its own, before the token.
        num_broken = bool(pending_bytes) and len(first_text) + bool(self._decoder.getstate()[0]) > 1
        self.begin = self._length + num_broken
        return self._without_leading(first_text + self._decoder.decode(token_bytes[1:]))

    def flush(self) -> str:
        """Ends the stream.  Returns a replacement character if the last character is incomplete, else an empty text."""
        return self._without_leading(self._decoder.decode(b"", final=True))

    def _without_leading(self, text: str) -> str:
        num_spaces = min(self._leading, len(text) - len(text.lstrip(" ")))
        self._leading = 0 if num_spaces < len(text) else self._leading - num_spaces
        self._length += len(text) - num_spaces
        return text[num_spaces:]
