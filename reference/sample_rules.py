"""Checks the settings and the logit edits that `sample` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from rooflab.reference.contract import CallArguments, Dims
from rooflab.reference.rules import check_offsets


@dataclass(frozen=True)
class Edits:
    """The optional arguments of `sample` that change a row's logits. An argument that is None changes nothing."""

    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    edit_offsets: torch.Tensor | None = None
    edit_ids: torch.Tensor | None = None
    edit_counts: torch.Tensor | None = None
    edit_bias: torch.Tensor | None = None
    allowed: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the arguments that are not None, by name."""
        named_tensors = ((edit_field.name, getattr(self, edit_field.name)) for edit_field in fields(self))
        return {field_name: field_value for field_name, field_value in named_tensors if field_value is not None}


EDIT_NAMES = ("edit_offsets", "edit_ids", "edit_counts", "edit_bias")
"""The names of the edits of which a call gives all or none."""
SETTING_NAMES = ("temperature", "top_k", "top_p", "min_p")


def settings_fit(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if the vocabulary size or `top_n` is out of range, or an edit tensor is missing or wrong."""
    V, top_n = dims["V"], arguments.get("top_n")
    if not 0 < V <= 2**31 - 1:
        raise ValueError(f"logits: expected between 1 and 2**31 - 1 tokens, got {V}")
    if top_n is not None and not 0 <= top_n <= V:
        raise ValueError(f"top_n: expected 0 to {V}, got {top_n}")
    given_edits = edits_of(arguments)
    missing_edits = [edit_name for edit_name in EDIT_NAMES if edit_name not in given_edits.tensors]
    other_edits = sorted(set(given_edits.tensors) - {"allowed"})
    if missing_edits and other_edits:
        raise ValueError(f"{missing_edits[0]}: expected a tensor beside {', '.join(other_edits)}, got None")
    if given_edits.allowed is not None and dims["words"] != -(-V // 32):
        raise ValueError(f"allowed: expected {-(-V // 32)} words, a bit for each token, got {dims['words']}")


def values_fit(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if a row's temperature, top_k, top_p or min_p is out of range. Also checks the arguments that
    change logits: penalties, and the ids, counts and biases of single tokens."""
    for row, row_settings in enumerate(zip(*(arguments[name].tolist() for name in SETTING_NAMES), strict=True)):
        _check_row(row, *row_settings)
    _check_edit_values(edits_of(arguments), dims["V"])


def finite_rows(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if the largest logit of a row is NaN or infinite."""
    row_max = arguments["logits"].float().amax(1)  # NaN if the row has a NaN
    for row in (~row_max.isfinite()).nonzero().flatten().tolist()[:1]:
        raise ValueError(f"logits: row {row}: expected a finite largest value, got {row_max[row].item()}")


def edits_of(arguments: CallArguments) -> Edits:
    """Returns the arguments of a call of `sample` that change logits: penalties, token counts, biases and allowed
    tokens."""
    return Edits(**{edit_field.name: arguments.get(edit_field.name) for edit_field in fields(Edits)})


def _check_row(row: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raises `ValueError` if a sampling setting of one row (such as `top_p`) is out of range or NaN."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a finite value >= 0, got {temperature} in row {row}")
    if top_k < 0:
        raise ValueError(f"top_k: expected >= 0 (0 is off), got {top_k} in row {row}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: expected a value in (0, 1], got {top_p} in row {row}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p: expected a value in [0, 1], got {min_p} in row {row}")


def _check_edit_values(edits: Edits, V: int) -> None:
    """Raises `ValueError` if a value that changes logits is out of range: a penalty, or the id, count or bias of a
    token. Also raises it if a row of logits has two biases for one token. The error names the row."""
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        values = edits.tensors.get(name)
        for row, edit_value in enumerate(() if values is None else values.tolist()):
            if not math.isfinite(edit_value) or (name == "repetition_penalty" and edit_value <= 0):
                expected_text = "a finite value > 0" if name == "repetition_penalty" else "a finite value"
                raise ValueError(f"{name}: expected {expected_text}, got {edit_value} in row {row}")
    row_bounds, token_ids, token_counts, biases = edits.edit_offsets, edits.edit_ids, edits.edit_counts, edits.edit_bias
    if row_bounds is None or token_ids is None or token_counts is None or biases is None:
        return
    check_offsets("edit_offsets", row_bounds, len(token_ids))
    row_ids = torch.arange(len(row_bounds) - 1, device=token_ids.device).repeat_interleave(row_bounds.diff())
    value_checks = (
        ("edit_ids", token_ids, (token_ids < 0) | (token_ids >= V), f"0 to {V - 1}"),
        ("edit_counts", token_counts, token_counts < -1, ">= -1"),
        ("edit_bias", biases, biases.isnan() | (biases == math.inf), "a finite value or -inf"),
    )
    for name, values, wrong_mask, expected_text in value_checks:
        if bool(wrong_mask.any()):
            wrong_index = int(wrong_mask.int().argmax())
            raise ValueError(
                f"{name}: expected {expected_text}, got {values[wrong_index].item()} in row {int(row_ids[wrong_index])}"
            )
    unique_pairs, key_counts = torch.unique(row_ids * V + token_ids, return_counts=True)
    if len(unique_pairs) < len(token_ids):
        dup_key = int(unique_pairs[key_counts > 1][0])
        raise ValueError(f"edit_ids: expected each token once in a row, got {dup_key % V} again in row {dup_key // V}")
