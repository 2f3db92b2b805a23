"""Reads a model's own sampling settings, from generation_config.json or from `general.sampling` of a GGUF file.

Refuses fields that would change answers but are not implemented (`REFUSED_FIELDS`).  Ignores other unknown fields, and
also the answer's length and `do_sample` (random or greedy), which only requests set.  Requests override the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rooflab.engine.sequence import MODEL_SETTINGS, SamplingParams

REFUSED_FIELDS: Mapping[str, float | None] = {
    **dict.fromkeys(
        "begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty sequence_bias"
        " stop_strings constraints force_words_ids dola_layers watermarking_config top_h suppress_tokens"
        " bad_words_ids".split()
    ),
    **dict.fromkeys(
        "min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha diversity_penalty"
        " epsilon_cutoff eta_cutoff token_healing mirostat xtc_probability".split(),
        0,
    ),
    **dict.fromkeys("encoder_repetition_penalty guidance_scale typical_p num_beams num_beam_groups".split(), 1),
}
"""Refused fields, which would change an answer, with the value that means off.  Null and empty values mean off too."""


def read_generation(source: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Returns the settings in `MODEL_SETTINGS`, with the model's own values from `fields`.  Raises `ValueError` on a
    field in `REFUSED_FIELDS`, on a setting of the wrong type, and on a value out of range."""
    for name, neutral_value in REFUSED_FIELDS.items():
        if (value := fields.get(name)) not in (None, neutral_value, [], {}):
            raise ValueError(f"model: {source}: {name} {value!r:.60} is not implemented")
    settings = MODEL_SETTINGS | {name: fields[name] for name in MODEL_SETTINGS if fields.get(name) is not None}
    try:
        SamplingParams(**settings)
    except ValueError as error:
        raise ValueError(f"model: {source}: {error}") from None
    return settings


def with_settings(params: SamplingParams, settings: Mapping[str, float]) -> SamplingParams:
    """Returns `params`, with each None field replaced by the model's value in `settings`."""
    model_values: dict[str, Any] = {name: value for name, value in settings.items() if getattr(params, name) is None}
    return replace(params, **model_values) if model_values else params
