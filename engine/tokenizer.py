"""Converts text to token ids and back with the model's own tokenizer and chat template (transformers, tokenizers)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

ChatMessage = Mapping[str, str]
Prompt = str | Sequence[ChatMessage] | Sequence[int]


class Tokenizer:
    """The tokenizer of the model at `path`, a GGUF file or a Hugging Face folder."""

    def __init__(self, path: Path):
        from transformers import AutoTokenizer  # the import takes a second, and dummy models do not need it
        from transformers.utils import logging

        logging.disable_progress_bar()
        file = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF conversion draws its own progress bar
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **file)
            except (OSError, ValueError, TypeError, KeyError) as error:
                first = str(error).strip().partition("\n")[0]
                raise ValueError(f"model: no tokenizer that transformers can read in {path}: {first}") from error
        self.size = len(self._tokenizer)
        """Token ids are below it."""
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.has_chat_template = self._tokenizer.chat_template is not None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a string (without the template) or of chat messages (through it); given ids stay as they are.

        Raises `ValueError` on an empty prompt, on text that UTF-8 cannot hold, or on any other type.
        """
        if isinstance(prompt, str):
            check_text(prompt)
            ids = list(self._tokenizer(prompt)["input_ids"])
        elif is_chat(prompt):
            if not self.has_chat_template:
                raise ValueError("prompt: this model has no chat template; pass a string or token ids")
            # One call renders and tokenizes: encoding the rendered text in a second call would double the BOS token.
            messages = [dict(cast(ChatMessage, message)) for message in prompt]
            check_text("".join(str(text) for message in messages for text in message.values()))
            encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            ids = list(encoded["input_ids"])
        else:
            ids = as_token_ids(prompt)
        if not ids:
            raise ValueError("prompt: expected at least one token, got an empty prompt")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self)


class Decoder(Protocol):
    """What turns tokens into text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""


class TextStream:
    """Decodes tokens as they arrive: `push` returns the text that a token completes, and `flush` returns the rest.

    Together they return the text of `decode`. A character that several tokens form is held back until it is whole.
    """

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        """First token of the window that is decoded again with each push."""
        self._end = 0
        """Number of tokens whose text has been returned."""

    def push(self, token_id: int) -> str:
        """The new text; empty while a character is incomplete."""
        self._ids.append(token_id)
        known = self._tokenizer.decode(self._ids[self._start : self._end])
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(known):
            return ""
        self._start, self._end = self._end, len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        """The text that was held back, replacement characters included."""
        known = self._tokenizer.decode(self._ids[self._start : self._end])
        rest = self._tokenizer.decode(self._ids[self._start :])[len(known) :]
        self._start = self._end = len(self._ids)
        return rest


def check_text(prompt: str) -> None:
    """Raises `ValueError` if `prompt` is not text: Python makes half characters of a command line's stray bytes."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt: expected text in UTF-8, got {prompt[error.start]!r} in it") from error


def is_chat(prompt: Any) -> bool:
    """Whether `prompt` is a list of chat messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def as_token_ids(prompt: Any) -> list[int]:
    """`prompt` as a list of token ids.  Raises `ValueError` if it holds anything else."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        raise ValueError(f"prompt: expected a string, chat messages or token ids, got {type(prompt).__name__}")
    for item in prompt:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(
                f"prompt: expected a string, chat messages or token ids, got a {type(item).__name__} in it"
            )
    return list(prompt)
