"""The bytes of each token, and the text of tokens as they arrive.

A token's bytes depend on no other token, so that an answer's text and the texts that are streamed of it are one.  Where
bytes are no UTF-8, each longest beginning of a character becomes one replacement character, as Unicode advises (chapter
3.9).  The decoder of `tokenizers` instead replaces all bytes of a run of byte tokens if one of them is wrong, which no
stream can know in advance.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """The bytes of a vocabulary's tokens, by the tokenizer's own decoder; those of special tokens are empty."""

    def __init__(self, tokenizer: Any):
        backend = tokenizer.backend_tokenizer
        decoder = json.loads(backend.to_str())["decoder"] or {"type": "Fuse"}
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        self._token = backend.id_to_token
        self._special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._replaced: list[tuple[str, str]] = []
        self._fallback = self._by_bytes = False
        self.leading = 0
        """How many spaces at a text's beginning belong to its first token and not to the text."""
        for step in steps:
            self._read(step)
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
        """The bytes of a token; empty for a special token and for an id without a token."""
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = b"" if token in self._special else self._bytes(self._token(token) or "")
        return piece

    def _bytes(self, text: str) -> bytes:
        if self._by_bytes:
            codes = [_BYTES.get(character) for character in text]
            return text.encode() if None in codes else bytes(byte for byte in codes if byte is not None)
        if self._fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            text = text.replace(old, new)
        return text.encode()


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in vocabularies of bytes: printable ones for themselves, then from 256
    on (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = byte_characters()


class TextStream:
    """Decodes tokens as they arrive: `push` returns the text that is certain with a token, and `flush` the rest.

    A character that several tokens form comes when it is whole, or once no character can become of it.
    """

    def __init__(self, piece: Callable[[int], bytes], leading: int = 0):
        self._piece, self._leading, self._length = piece, leading, 0
        self.begin = 0
        """The place in the text where the last token begins; inside a character, the character's place."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The new text; empty while a character is incomplete."""
        piece, held = self._piece(token_id), self._decoder.getstate()[0]
        first = self._decoder.decode(piece[:1])
        # Where the byte does not continue what is held back, that becomes a character of its own, before the token.
        broken = bool(held) and len(first) + bool(self._decoder.getstate()[0]) > 1
        self.begin = self._length + broken
        return self._without_leading(first + self._decoder.decode(piece[1:]))

    def flush(self) -> str:
        """The text that was held back: a replacement character for an incomplete one."""
        return self._without_leading(self._decoder.decode(b"", final=True))

    def _without_leading(self, text: str) -> str:
        while self._leading and text:
            if text[0] != " ":
                self._leading = 0
                break
            text = text[1:]
            self._leading -= 1
        self._length += len(text)
        return text
