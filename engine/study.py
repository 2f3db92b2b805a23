"""Defines switches that turn off one part of the engine, so that a study can measure the effect of that part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooflab.engine.core import Core
from rooflab.engine.sequence import Sequence


@dataclass(frozen=True)
class StudyOptions:
    """Switches parts of the engine off.  A study changes one switch: `LLM(study=StudyOptions(kv_cache=False))`."""

    kv_cache: bool = True
    """False computes every token again in every step, without chunks and without a prefix cache."""
    contiguous_kv: bool = False
    """Whether each sequence has one page of `max_model_len` tokens."""
    continuous_batching: bool = True
    """False starts a batch only after the batch before has ended (static batches)."""


def switched(study: StudyOptions | None, beside: Mapping[str, Any]) -> StudyOptions:
    """Returns `study`, the switches that turn off parts of the engine. If it is None, the switches turn off nothing.

    `beside` holds unknown options of `LLM`, and must be empty. Raises `ValueError` on an option that belongs in
    `StudyOptions`, and shows the right spelling. Raises `TypeError` on any other option."""
    for option_name, option_value in beside.items():
        if option_name not in StudyOptions.__dataclass_fields__:
            raise TypeError(f"LLM: got an option that it does not have, {option_name}")
        correct_option = f"study=StudyOptions({option_name}={option_value!r}), of rooflab.engine.study"
        raise ValueError(f"{option_name}: expected {correct_option}, got it as an option of LLM")
    return study or StudyOptions()


class RecomputingCore(Core):
    """Runs the engine like `Core`, but computes every token again in every step."""

    def _step(self) -> list[Sequence]:
        sequences = super()._step()
        self.forget()
        return sequences
