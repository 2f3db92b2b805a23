"""Switches for single studies: a study turns off one part of the engine, to measure what that part brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooflab.engine.core import Core
from rooflab.engine.sequence import Sequence


@dataclass(frozen=True)
class StudyOptions:
    """Switches of an engine's parts; a study changes one: `LLM(study=StudyOptions(kv_cache=False))`."""

    kv_cache: bool = True
    """False lets every step compute every token again, so that there are neither chunks nor a prefix cache."""
    contiguous_kv: bool = False
    """Whether each sequence has one page of `max_model_len` tokens."""
    continuous_batching: bool = True
    """False lets a batch end before the next begins (static batches)."""


def switched(study: StudyOptions | None, beside: Mapping[str, Any]) -> StudyOptions:
    """Returns `study`, or every part switched on.  `beside` holds the options that `LLM` does not have.

    Raises `ValueError` with the new spelling of an option that is a switch now, and `TypeError` for any other.
    """
    for name, value in beside.items():
        if name not in StudyOptions.__dataclass_fields__:
            raise TypeError(f"LLM: got an option that it does not have, {name}")
        spelling = f"study=StudyOptions({name}={value!r}), of rooflab.engine.study"
        raise ValueError(f"{name}: expected {spelling}, got it as an option of LLM")
    return study or StudyOptions()


class RecomputingCore(Core):
    """Computes every token again in every step."""

    def _step(self) -> list[Sequence]:
        got = super()._step()
        self.forget()
        return got
