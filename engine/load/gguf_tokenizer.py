"""Builds a tokenizer from the header of a GGUF file: its tokens, ids, types and merges.

Regular expressions split a text before the merges.  The header holds only their name (`tokenizer.ggml.pre`).  The
expressions here are from the models' tokenizer.json.  llama.cpp's `llama-vocab.cpp` lists them by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooflab.engine.load.gguf_file import read_gguf

_NORMAL, _CONTROL, _USER, _BYTE = 1, 3, 4, 6
"""Types of tokens.  Control tokens are not text.  Tokens of the type `_USER` are matched before the merges."""
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_WORDS_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT_4_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPERCASE, _LOWERCASE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_REGEX = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPERCASE}*{_LOWERCASE}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPERCASE}+{_LOWERCASE}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_2_REGEXES, _LLAMA_3_REGEXES, _DIGITS_REGEXES = (_WORDS_REGEX,), (_GPT_4_REGEX % "{1,3}",), (r"\p{N}", _WORDS_REGEX)
_QWEN_2_REGEXES = (_GPT_4_REGEX % "",)
_REGEXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA_3_REGEXES),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS_REGEXES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_2_REGEXES),
    **dict.fromkeys(("gpt-2", "mpt"), _GPT_2_REGEXES),
    "tekken": (_TEKKEN_REGEX,),
}
_KEY_TYPES = (
    ("model pre chat_template", str, False),
    ("tokens merges", str, True),
    ("token_type", int, True),
    ("scores", float, True),
    ("bos_token_id eos_token_id unknown_token_id", int, False),
    ("add_bos_token add_eos_token add_space_prefix", bool, False),
)
"""The names of keys, the type of their values, and whether a value is a list of that type."""
_WHOLE_WORD_NAMES = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""With these names, a word that is itself a token is not cut, whatever the merges say, and a text begins with BOS."""


def gguf_tokenizer(path: Path) -> Any:
    """Returns the tokenizer of a GGUF file as a transformers object.  Raises `ValueError` on an unknown tokenizer."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    gguf_fields = read_gguf(path).fields

    def get(name: str, default: Any = None) -> Any:
        return gguf_fields.get(f"tokenizer.ggml.{name}", default)

    _check_types(path.name, gguf_fields)
    kind, tokens, pre = get("model"), get("tokens"), get("pre", "default")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(f"model: {path.name}: expected a tokenizer.ggml.model gpt2 or llama with tokens, got {kind!r}")
    if kind == "gpt2" and pre not in _REGEXES:
        raise ValueError(f"model: {path.name}: tokenizer.ggml.pre {pre!r} is not known; expected {', '.join(_REGEXES)}")
    types = get("token_type") or [_NORMAL] * len(tokens)
    lists_by_key = {"token_type": types, **({"scores": get("scores") or ()} if kind == "llama" else {})}
    for name, values in lists_by_key.items():
        if len(values) != len(tokens):
            raise ValueError(f"model: {path.name}: expected tokenizer.ggml.{name} of {len(tokens)}, got {len(values)}")
    special_ids = {
        name: get(f"{name}_token_id", default) for name, default in (("bos", None), ("eos", None), ("unknown", 0))
    }
    for name, token_id in special_ids.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(f"model: {path.name}: expected tokenizer.ggml.{name}_token_id of a token, got {token_id}")
    bos, eos, unk_token = (None if token_id is None else tokens[token_id] for token_id in special_ids.values())
    vocab = dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))  # of two alike the first
    if kind == "llama":
        backend = _sentencepiece(tokens, types, lists_by_key["scores"], vocab, unk_token, get("add_space_prefix", True))
    else:
        backend = _byte_level(path.name, vocab, get("merges", ()), pre)
    added = [(token, kind == _CONTROL) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER)]
    backend.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in added])
    adds_bos = bos is not None and get("add_bos_token", kind == "llama" or pre in _WHOLE_WORD_NAMES)
    adds_eos = eos is not None and get("add_eos_token", False)
    if adds_bos or adds_eos:
        template_parts = [*([bos] if adds_bos else []), "$A", *([eos] if adds_eos else [])]
        special = [(token, vocab[token]) for token in (bos, eos) if token in template_parts]
        backend.post_processor = processors.TemplateProcessing(single=template_parts, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        chat_template=gguf_fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _check_types(file: str, header: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a tokenizer key of the GGUF header has a value of the wrong type."""
    for key_names, kind, is_list in _KEY_TYPES:
        for name in key_names.split():
            name = name if name == "chat_template" else f"ggml.{name}"
            value = header.get(f"tokenizer.{name}")
            values = value if is_list and isinstance(value, list) else [value]
            if value is not None and not (isinstance(value, list) == is_list and all(type(v) is kind for v in values)):
                actual_type = f"{type(value).__name__} {str(value)[:40]}"
                expected_type = f"a list of {kind.__name__}" if is_list else kind.__name__
                raise ValueError(f"model: {file}: expected {expected_type} as tokenizer.{name}, got {actual_type}")


def _byte_level(file: str, vocab: dict[str, int], merges: Sequence[str], pre: str) -> Any:
    """Makes a byte-level BPE tokenizer (GPT-2).  Raises `ValueError` without `merges` or if `vocab` lacks a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merge_pairs = [(left_part, right_part) for left_part, _, right_part in (merge.partition(" ") for merge in merges)]
    if not merge_pairs:
        raise ValueError(f"model: {file} has no tokenizer.ggml.merges; without them a text would be cut into bytes")
    for merge_pair in merge_pairs:
        for token in (*merge_pair, "".join(merge_pair)):
            if token not in vocab:
                raise ValueError(f"model: {file}: tokenizer.ggml.merges merges {merge_pair}, and {token!r} is no token")
    backend = Tokenizer(models.BPE(vocab, merge_pairs, ignore_merges=pre in _WHOLE_WORD_NAMES))
    splitters = [pre_tokenizers.Split(Regex(word_regex), "isolated") for word_regex in _REGEXES[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splitters, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    vocab: dict[str, int],
    unknown: str | None,
    space_first: bool,
) -> Any:
    """Makes a SentencePiece BPE tokenizer: the pair with the highest score merges first (Kudo and Richardson 2018)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    text_tokens = {token for token, type_id in zip(tokens, types, strict=True) if type_id not in (_CONTROL, _BYTE)}
    merges = [
        (-scores[vocab[token]], vocab[token[:position]], vocab[token[position:]], token[:position], token[position:])
        for token in text_tokens
        for position in range(1, len(token))
        if token[:position] in text_tokens and token[position:] in text_tokens
    ]
    merge_pairs = [merge[3:] for merge in sorted(merges)]
    bpe_model = models.BPE(vocab, merge_pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    backend = Tokenizer(bpe_model)
    replacer = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), replacer]) if space_first else replacer
    decoder_steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoder_steps, decoders.Strip(" ", 1, 0)] if space_first else decoder_steps)
    return backend
