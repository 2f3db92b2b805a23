"""Prompts to token ids, and tokens to text."""

from __future__ import annotations

from pathlib import Path

from rooflab.engine.load.model_files import DEFAULT_MODEL, fetch
from rooflab.engine.load.pieces import TextStream
from rooflab.engine.load.tokenizer import Prompt, Tokenizer, as_token_ids, check_text, is_chat, some


class Numbers:
    """In place of a tokenizer, for a model of random weights: the bytes of a text are its ids, and a token's text is
    its id."""

    longest = 1

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def encode(self, prompt: Prompt) -> list[int]:
        """As `Tokenizer`; of chat messages the texts are joined."""
        if isinstance(prompt, str):
            check_text(prompt)
            ids = [byte % self._vocab_size for byte in prompt.encode()]
        elif is_chat(prompt):
            return self.encode("\n".join(message["content"] for message in prompt))  # type: ignore[index]
        else:
            ids = as_token_ids(prompt)
        return some(ids)

    def named(self, token_id: int) -> tuple[str, bytes]:
        """As `Tokenizer`: the id behind a space."""
        return f" {token_id}", f" {token_id}".encode()

    def stream(self) -> TextStream:
        """As `Tokenizer`."""
        return TextStream(lambda token: self.named(token)[1])


Texts = Tokenizer | Numbers


def texts_of(model: str, dummy: bool, vocab_size: int) -> Texts:
    """The tokenizer of a model, as `LLM` would open it."""
    if dummy:
        return Numbers(vocab_size)
    return Tokenizer(fetch() if model == DEFAULT_MODEL else Path(model))
