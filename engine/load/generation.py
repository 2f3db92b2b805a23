"""How a model wants its tokens drawn (generation_config.json, `general.sampling` of a GGUF): each field is kept, is
refused by its name, or changes no answer.

A request's own settings win.  It alone says how long an answer may be, and whether tokens are drawn (`do_sample`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rooflab.engine.sequence import LARGEST, OF_MODEL, SamplingParams

REFUSED: Mapping[str, float | None] = {
    **dict.fromkeys(
        "begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty sequence_bias"
        " stop_strings constraints force_words_ids dola_layers watermarking_config top_h".split()
    ),
    **dict.fromkeys(
        "min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha diversity_penalty"
        " epsilon_cutoff eta_cutoff token_healing mirostat xtc_probability".split(),
        0,
    ),
    **dict.fromkeys("encoder_repetition_penalty guidance_scale typical_p num_beams num_beam_groups".split(), 1),
}
"""Fields that change an answer and are not kept, with the value that means off; null and what is empty are off too."""


@dataclass(frozen=True)
class Generation:
    """A model's own settings, and the tokens that it never draws."""

    settings: Mapping[str, float] = field(default_factory=lambda: OF_MODEL)
    never: Collection[int] = ()

    def of(self, params: SamplingParams) -> SamplingParams:
        """`params` with the model's settings where they say nothing, and without the tokens that never come."""
        changes: dict[str, Any] = {name: own for name, own in self.settings.items() if getattr(params, name) is None}
        if self.never:
            changes["logit_bias"] = {**(params.logit_bias or {}), **dict.fromkeys(self.never, -LARGEST)}
        return replace(params, **changes) if changes else params


def read_generation(source: str, fields: Mapping[str, Any], ends: Collection[int], vocab_size: int) -> Generation:
    """What the fields say.  Raises `ValueError` on one that is refused, and on a value of another type."""
    for name, off in REFUSED.items():
        if (value := fields.get(name)) not in (None, off, [], {}):
            raise ValueError(f"model: {source}: {name} {value!r:.60} is not implemented")
    settings = OF_MODEL | {name: fields[name] for name in OF_MODEL if fields.get(name) is not None}
    try:
        SamplingParams(**settings)
    except ValueError as error:
        raise ValueError(f"model: {source}: {error}") from None
    names = ("suppress_tokens", "bad_words_ids")
    suppressed, words = ([] if fields.get(name) is None else fields[name] for name in names)
    if not _are_ids(suppressed):
        raise ValueError(f"model: {source}: expected token ids as suppress_tokens, got {suppressed!r:.60}")
    if not isinstance(words, list) or not all(_are_ids(word) and len(word) == 1 for word in words):
        raise ValueError(f"model: {source}: expected lists of one token id as bad_words_ids, got {words!r:.60}")
    # As in transformers, an end token comes although it is a bad word.
    never = {*suppressed, *({word[0] for word in words} - {*ends})}
    return Generation(settings, [token for token in never if token < vocab_size])


def _are_ids(found: Any) -> bool:
    return isinstance(found, list) and all(type(token) is int and token >= 0 for token in found)
