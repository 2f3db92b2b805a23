"""Converts text to token ids and back with the model's own tokenizer and chat template (transformers, tokenizers)."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rooflab.engine.load.gguf_tokenizer import gguf_tokenizer
from rooflab.engine.load.pieces import Pieces, TextStream
from rooflab.roofline.architecture import read_json

_READ_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError)
_TEMPLATE_ERRORS = (*_READ_ERRORS, ArithmeticError, AssertionError, MemoryError, NameError, RuntimeError)
"""The errors that the expressions of a template may raise, because they are Python's."""
_TURN_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|eom_id|>")
ChatMessage = Mapping[str, Any]
Prompt = str | Sequence[ChatMessage] | Sequence[int]


class Tokenizer:
    """Wraps the tokenizer of the model at `path`, which is a GGUF file or a Hugging Face folder."""

    def __init__(self, path: Path):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = gguf_tokenizer(path) if path.is_file() else _of_folder(path)
        self.pieces = Pieces(self._tokenizer, {character: byte for byte, character in bytes_to_unicode().items()})
        self.size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        """The vocabulary size: the largest token id plus 1."""
        self.longest = max(map(len, self._tokenizer.get_vocab()), default=0)
        """The most characters of a token.  A vocabulary has a character for each byte, or for each text character."""
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        added_tokens = self._tokenizer.added_tokens_decoder.items()
        self.special: dict[str, int] = {str(token): token_id for token_id, token in added_tokens if token.special}
        """The ids of special tokens by name.  No text shows these tokens."""
        self.turn_ends = [self.special[name] for name in _TURN_END_TOKENS if path.is_file() and name in self.special]
        """The end tokens of a GGUF file, found by their names, because older files have no key for them."""
        self.has_chat_template = self._tokenizer.chat_template is not None

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of `prompt`: a string, chat messages, or token ids (returned unchanged).

        Only chat messages use the chat template.  Raises `ValueError` on an empty prompt, text that UTF-8 cannot
        encode, messages that the template refuses, and other types."""
        if isinstance(prompt, str):
            check_text(prompt)
            token_ids = list(self._tokenizer(prompt)["input_ids"])
        elif is_chat(prompt):
            if not self.has_chat_template:
                raise ValueError("prompt: this model has no chat template; pass a string or token ids")
            # One call renders and tokenizes: encoding the rendered text in a second call would double the BOS token.
            messages = [_of_text(cast(ChatMessage, message)) for message in prompt]
            check_text("".join(str(text) for message in messages for text in message.values()))
            encoded_chat = self._through_template(messages)
            token_ids = list(encoded_chat["input_ids"])
        else:
            token_ids = as_token_ids(prompt)
        return some(token_ids)

    def _through_template(self, messages: Sequence[ChatMessage]) -> Mapping[str, Any]:
        from jinja2 import TemplateError  # as heavy as transformers, which imports it

        try:
            encoded_chat = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except (*_TEMPLATE_ERRORS, TemplateError) as error:
            error_kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"prompt: the chat template refuses these messages: {error_kind}{error}") from error
        return cast(Mapping[str, Any], encoded_chat)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` without special tokens.  `stream` gives the same text."""
        text_stream = self.stream()
        return "".join([*map(text_stream.push, token_ids), text_stream.flush()])

    def named(self, token_id: int) -> tuple[str, bytes]:
        r"""Returns the token's name and bytes.  For bytes that are not UTF-8, the name has the form `bytes:\xd2`."""
        token_bytes = self.pieces(token_id)
        if not token_bytes:  # a special token: its own text
            name = str(self._tokenizer.convert_ids_to_tokens(token_id) or "")
            return name, name.encode()
        try:
            return token_bytes.decode(), token_bytes
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes), token_bytes

    def other_token(self, other: Tokenizer) -> tuple[str, int | None] | None:
        """Returns a token whose id differs in the tokenizer `other`, and its id there.  None means all ids agree."""
        id_of = other._tokenizer.get_vocab()
        vocabulary = self._tokenizer.get_vocab().items()
        return next(((token, id_of.get(token)) for token, token_id in vocabulary if id_of.get(token) != token_id), None)

    def stream(self) -> TextStream:
        """Returns a new decoder, which turns tokens into text as they arrive."""
        return TextStream(self.pieces, self.pieces.leading)


class Numbers:
    """Replaces the tokenizer for random weights.  Each byte of a text becomes a token id.  A token's text is its id."""

    longest = 1
    special: Mapping[str, int] = {}
    has_chat_template = False

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the bytes of a text as token ids.  The texts of chat messages are joined by newlines."""
        if is_chat(prompt):
            messages = cast(Sequence[ChatMessage], prompt)
            prompt = "\n".join(str(_of_text(message).get("content", "")) for message in messages)
        if not isinstance(prompt, str):
            return some(as_token_ids(prompt))
        check_text(prompt)
        return some([byte % self._vocab_size for byte in prompt.encode()])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`: a space and the id for each token."""
        return "".join(f" {token}" for token in token_ids)

    def named(self, token_id: int) -> tuple[str, bytes]:
        """Returns a token's name (a space and its id) and the name's bytes. A model with random weights lacks words."""
        return f" {token_id}", f" {token_id}".encode()

    def stream(self) -> TextStream:
        """Returns a new decoder, which turns tokens into text as they arrive."""
        return TextStream(lambda token: self.named(token)[1])


Texts = Tokenizer | Numbers


def _of_folder(path: Path) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoTokenizer  # the import takes a second; dummy models do not need it

    try:
        # Of config.json only what names a class: transformers refuses a hidden size that is no multiple of the heads.
        fields = read_json(path / "config.json")
        config = AutoConfig.for_model(fields["model_type"].lower(), tokenizer_class=fields.get("tokenizer_class"))
        tokenizer = AutoTokenizer.from_pretrained(path, config=config, local_files_only=True)
        tokenizer("a")  # a post-processor's unknown token is found only now
        return tokenizer
    except BaseException as error:
        # What is wrong in tokenizer.json comes from Rust, as the bare class or as a panic.
        rust = type(error) is Exception or type(error).__name__ == "PanicException"
        if not (rust or isinstance(error, (*_READ_ERRORS, StrictDataclassError))):
            raise
        bad_file = "tokenizer.json" if rust else "config.json" if isinstance(error, StrictDataclassError) else str(path)
        error_text = " ".join(str(error).split())
        raise ValueError(f"model: no tokenizer that transformers can read in {bad_file}: {error_text:.300}") from error


def _of_text(message: ChatMessage) -> dict[str, Any]:
    """Returns the message with its content as one string.  If the content is a list of text parts, joins them."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"prompt: expected parts of type 'text' with a text as content, got {part!r}")
    return {**message, "content": "".join(part["text"] for part in content)}


def check_text(prompt: str) -> None:
    """Raises `ValueError` if `prompt` has lone surrogates.  Python makes them from invalid bytes of a command line."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt: expected text in UTF-8, got {prompt[error.start]!r} in it") from error


def some(ids: list[int]) -> list[int]:
    """Returns `ids`, which must hold some ids.  Raises `ValueError` if `ids` is empty."""
    if not ids:
        raise ValueError("prompt: expected at least one token, got an empty prompt")
    return ids


def is_chat(prompt: Any) -> bool:
    """Returns whether `prompt` is a list of chat messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def as_token_ids(prompt: Any) -> list[int]:
    """Returns `prompt` as a list of token ids.  Raises `ValueError` if `prompt` holds anything else."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not is_list or any(type(token_id) is not int for token_id in prompt):
        raise ValueError(f"prompt: expected a string, chat messages or token ids, got {reprlib.repr(prompt)}")
    return list(prompt)
