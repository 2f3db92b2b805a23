"""Text in and out with the model's own tokenizer: templates, and streams that never break a character."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import byte_characters, write_model

from rooflab.bench.engine.runs import as_prompt, chat
from rooflab.engine.load.gguf_tokenizer import gguf_tokenizer
from rooflab.engine.load.model_files import fetch
from rooflab.engine.load.pieces import Pieces, TextStream
from rooflab.engine.load.tokenizer import Tokenizer
from rooflab.engine.load.weights import load_weights

pytestmark = pytest.mark.needs("weights")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(fetch())


def test_a_token_has_its_own_bytes_also_where_it_is_a_part_of_a_character(tokenizer):
    tokens = tokenizer.encode(text := "caf\u00e9 \U0001f99c\u2603 \u4e2d\u6587\n")
    names, own = zip(*map(tokenizer.named, tokens), strict=True)
    assert b"".join(own) == text.encode()
    parts = [name for name in names if name.startswith("bytes:")]
    assert parts and all(re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", name) for name in parts)
    assert tokenizer.named(2) == ("<|im_end|>", b"<|im_end|>")
    assert tokenizer.longest == 81


def test_trap_18_chat_goes_through_the_template_once_and_a_text_stands_as_it_is(tokenizer):
    ids = tokenizer.encode([{"role": "user", "content": "What is the capital of France?"}])
    text = "".join(tokenizer.named(token)[0] for token in ids)
    assert text.count("<|im_start|>") == 3 and text.endswith("<|im_start|>assistant\n")
    assert ids[0] == 1 and ids.count(1) == 3  # <|im_start|> is also the BOS token: none doubled
    assert "capital of France" in text
    assert tokenizer.encode("Hello world") == [19556, 905] and tokenizer.decode([19556, 905]) == "Hello world"


HALF = "caf\udce9"


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "empty prompt"),
        ([], "empty prompt"),
        (HALF, "prompt: expected text in UTF-8"),
        ([{"role": "user", "content": HALF}], "prompt: expected text in UTF-8"),
        ([1, "x"], "prompt: expected a string, chat messages or token ids"),
        ([True], "or token ids"),
        (5, "or token ids"),
    ],
)
def test_what_is_no_prompt_is_refused(tokenizer, prompt, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(prompt)


def test_parts_of_text_are_one_text(tokenizer):
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    whole = tokenizer.encode([{"role": "user", "content": "Hello world"}])
    assert tokenizer.encode([{"role": "user", "content": parts}]) == whole
    for part in ({"type": "image_url", "image_url": {}}, "Hello", {"type": "text"}):
        with pytest.raises(ValueError, match="prompt: expected parts of type 'text'"):
            tokenizer.encode([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ 1 // 0 }}", "ZeroDiv"),
        ("{{ range(10 ** 9) }}", "OverflowError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_what_a_template_refuses_is_one_sentence(tmp_path, template, words):
    fields = {"tokenizer_pre": "qwen2", "token_merges": ["a b"], "chat_template": template}
    tokenizer = in_gguf(tmp_path / "a.gguf", "gpt2", [*byte_characters(), "ab"], **fields)
    with pytest.raises(ValueError, match=f"prompt: the chat template refuses these messages: {words}"):
        tokenizer.encode([{"role": "user", "content": "Hello"}])


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.flush()]


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), text=st.text(max_size=40))
def test_trap_41_any_ids_stream_to_what_they_decode_to(tokenizer, ids, text):
    for own in (ids, tokenizer.encode(f"a{text}")):  # of some characters alone no token is left, and that is no prompt
        assert "".join(streamed(tokenizer, own)) == tokenizer.decode(own)


MARK = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = [MARK, f"{MARK}the", "the", f"{MARK}caf", "é", "🙂", "a", ",", f"{MARK}{MARK}", "\N{LATIN SMALL LETTER I}x"]


def of_kind(kind):
    """A tokenizer of a family's decoder: 256 byte tokens (but for `words`), words, and a special token."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    replaced = decoders.Replace(MARK, " ")
    steps = [replaced, decoders.ByteFallback(), decoders.Fuse()]
    decoder, names = {
        "bytes": (decoders.ByteLevel(), [*byte_characters(), "Ġthe", "Ã©"]),
        "llama": (decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]), [f"<0x{n:02X}>" for n in range(256)] + WORDS),
        "gemma": (decoders.Sequence(steps), [f"<0x{n:02X}>" for n in range(256)] + WORDS),
        "words": (decoders.Sequence([replaced, decoders.Fuse()]), WORDS),
    }[kind]
    backend = Backend(models.WordLevel({name: number for number, name in enumerate(names)}, names[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma", "words"])
def test_stream_and_result_are_one_text_and_that_of_transformers_where_bytes_are_characters(kind):
    """20,000 sequences: half of any tokens, half of whole texts cut into bytes."""
    theirs, draw = of_kind(kind), random.Random(0)
    pieces, size, vocab = Pieces(theirs, byte_characters()), len(theirs), theirs.get_vocab()
    as_byte = {
        byte: vocab.get(name if kind == "bytes" else f"<0x{byte:02X}>") for name, byte in byte_characters().items()
    }
    for number in range(20_000):
        ids = [draw.randrange(size + 2) for _ in range(draw.randrange(12))]  # two ids have no token
        if number % 2:
            text = "".join(draw.choice(["a", "é", "Ҥ", "🙂", " ", "\n"]) for _ in range(6)).encode()
            ids = ids[:0] if kind == "words" else [as_byte[byte] for byte in text]
            ids += [vocab["<|end|>"]] * draw.randrange(2)
        stream = TextStream(pieces, pieces.leading)
        own = "".join([*map(stream.push, ids), stream.flush()])
        whole = b"".join(map(pieces, ids))
        if whole.startswith(b" " * pieces.leading):
            whole = whole[pieces.leading :]
        assert own == whole.decode(errors="replace"), ids
        if "\N{REPLACEMENT CHARACTER}" not in own:
            assert own == theirs.decode([one for one in ids if one < size], skip_special_tokens=True), ids


def in_gguf(path, model, tokens, types=None, **fields):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer(path)


def test_the_list_of_a_gguf_decides_and_a_word_that_is_a_token_is_not_cut(tmp_path):
    known = byte_characters()
    tokens = [*sorted(known, key=known.get), "ab", "abc", "<|begin|>", "<|own|>", "<unused>", "<|end|>", "<|im_end|>"]
    fields = {"token_merges": ["a b"], "bos_token_id": 258, "eos_token_id": 261, "chat_template": "{{ messages }}"}
    cut, whole = (
        in_gguf(tmp_path / pre, "gpt2", tokens, [1] * 258 + [3, 4, 5, 3, 3], tokenizer_pre=pre, **fields)
        for pre in ("qwen2", "llama-bpe")
    )
    assert (cut.size, cut.eos_token_id, cut.turn_ends) == (len(tokens), 261, [262]) and cut.has_chat_template
    assert cut.encode("abc") == [256, ord("c")] and whole.encode("abc") == [258, 257]
    assert cut.encode("<|own|>a<|end|>") == [259, ord("a"), 261]
    assert cut.decode([259, ord("a"), 261, 258, 256]) == "<|own|>aab"
    assert [as_prompt(SimpleNamespace(tokenizer=cut), "a", raw) for raw in (False, True)] == [chat("a"), "a"]


def test_a_sentencepiece_gguf_merges_by_scores_and_keeps_every_space(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), MARK, "a", "b", f"{MARK}a", "ab"]
    types, scores = [2, 3, 3] + [6] * 256 + [1] * 5, [0.0] * 259 + [-5.0, -6.0, -7.0, -2.0, -1.0]
    named = {"token_scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    first = in_gguf(tmp_path / "a.gguf", "llama", tokens, types, **named)
    assert first.encode("ab") == [1, 259, 263] and first.encode("a") == [1, 262] and first.encode(" a") == [1, 259, 262]
    assert first.encode("é") == [1, 259, 3 + 0xC3, 3 + 0xA9] and first.decode(first.encode(" aé")) == " aé"
    without = in_gguf(tmp_path / "b.gguf", "llama", tokens, types, **named, add_space_prefix=False, add_bos_token=False)
    assert without.encode(" ab") == [259, 263] and without.decode([259, 263]) == " ab"


@pytest.mark.parametrize(
    "model, fields, message",
    [
        ("bert", {}, "a.gguf: expected a tokenizer.ggml.model gpt2 or llama with tokens, got 'bert'"),
        ("gpt2", {"tokenizer_pre": "new"}, "tokenizer.ggml.pre 'new' is not known"),
        ("gpt2", {}, "tokenizer.ggml.pre 'default' is not known"),
        ("gpt2", {"tokenizer_pre": "qwen2"}, "a.gguf has no tokenizer.ggml.merges"),
        ("gpt2", {"tokenizer_pre": "qwen2", "token_merges": ["a c"]}, "'c' is no token"),
        ("llama", {}, "expected tokenizer.ggml.scores of 2, got 0"),
        ("llama", {"token_scores": [0.0, 0.0], "eos_token_id": 2}, "expected tokenizer.ggml.eos_token_id of a token"),
    ],
)
def test_a_tokenizer_of_a_gguf_that_is_not_known_is_refused(tmp_path, model, fields, message):
    with pytest.raises(ValueError, match=message):
        in_gguf(tmp_path / "a.gguf", model, ["a", "b"], **fields)


@pytest.mark.parametrize(
    "name, value",
    [
        ("tokens", [1, 2]),
        ("tokens", "ab"),
        ("merges", [1]),
        ("merges", ["a b", 1]),
        ("token_type", ["1", "1"]),
        ("bos_token_id", "0"),
        ("eos_token_id", True),
        ("unknown_token_id", [0]),
        ("add_bos_token", 1),
    ],
)
def test_a_key_of_another_type_is_refused_by_its_name(monkeypatch, name, value):
    own = {"model": "gpt2", "tokens": ["a", "b"], "pre": "qwen2", name: value}
    fields = {f"tokenizer.ggml.{key}": held for key, held in own.items()}
    monkeypatch.setattr("rooflab.engine.load.gguf_tokenizer.read_gguf", lambda path: SimpleNamespace(fields=fields))
    with pytest.raises(ValueError, match=f"a.gguf: expected .* as tokenizer.ggml.{name}, got "):
        gguf_tokenizer(Path("a.gguf"))


def test_the_doctor_says_what_was_understood_and_finds_other_weights(tmp_path, monkeypatch, rooflab):
    write_model(tmp_path, architectures=["LlamaForCausalLM"], eos_token_id=[7, 9])
    monkeypatch.setattr("rooflab.bench.engine.doctor.TEXTS", ("a,é🙂,a", ",a", ""))
    status, out, err = rooflab("doctor", tmp_path, "--json")
    found = json.loads(out)
    assert status == 0 and [row["differ"] for row in found["differences"]] == [0, 0], err
    understood = {row["what"]: row["understood"] for row in found["understood"]}
    assert understood["rope_theta"] == 10000.0 and understood["end tokens of config.json"] == "[7, 9]"

    def with_other_rows(*of):
        weights = load_weights(*of)
        weights.embedding[260::2] *= 1.5  # of every second token that no text here has
        return weights

    monkeypatch.setattr("rooflab.engine.llm.load_weights", with_other_rows)
    monkeypatch.setattr("rooflab.bench.engine.doctor.MAX_GAP", 0.5)  # more than what it makes of the other tokens
    assert rooflab("doctor", tmp_path)[0] == 11
