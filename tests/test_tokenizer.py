"""Text in and out with the model's own tokenizer: templates, and streams that never break a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflab.engine.model_files import fetch
from rooflab.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.needs("weights")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(fetch())


def test_trap_18_chat_goes_through_the_template_once(tokenizer):
    ids = tokenizer.encode([{"role": "user", "content": "What is the capital of France?"}])
    text = tokenizer._tokenizer.decode(ids)
    assert text.count("<|im_start|>") == 3 and text.endswith("<|im_start|>assistant\n")
    assert ids[0] == 1 and ids.count(1) == 3  # <|im_start|> is also the BOS token: none doubled
    assert "capital of France" in text


def test_a_string_stands_as_it_is(tokenizer):
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.decode([19556, 905]) == "Hello world"


def test_what_is_no_prompt_is_refused(tokenizer):
    half = "caf\udce9"
    for prompts, message in (
        (["", []], "empty prompt"),
        ([half, [{"role": "user", "content": half}]], r"prompt: expected text in UTF-8, got '\\udce9' in it"),
        ([[1, "x"], [True], b"bytes", 5, [1.5]], "prompt: expected a string, chat messages or token ids"),
    ):
        for prompt in prompts:
            with pytest.raises(ValueError, match=message):
                tokenizer.encode(prompt)


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    return pieces, stream.flush()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_streamed_text_equals_decoded_text(tokenizer, text):
    ids = tokenizer._tokenizer(text)["input_ids"]
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_trap_41_any_ids_stream_to_what_they_decode_to(tokenizer, ids):
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_a_character_split_across_tokens_comes_whole(tokenizer):
    text = "naïve 東京 🚀🏽 e\u0301"
    ids = tokenizer._tokenizer(text)["input_ids"]
    pieces, rest = streamed(tokenizer, ids)
    assert len(ids) > len([piece for piece in pieces if piece]), "no character was split, so this shows nothing"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces) and "".join(pieces) + rest == text
