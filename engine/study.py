"""Switches of single studies: parts of an engine that a study goes without, to see what they bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooflab.engine.core import Core
from rooflab.engine.sequence import Sequence


@dataclass(frozen=True)
class StudyOptions:
    """What an engine has: `LLM(study=StudyOptions(kv_cache=False))`."""

    kv_cache: bool = True
    """Without it every step computes every token again, so that there are neither chunks nor a prefix cache."""
    contiguous_kv: bool = False
    """Whether each sequence has one page of `max_model_len` tokens."""
    continuous_batching: bool = True
    """Without it a batch ends before the next begins."""


def switched(study: StudyOptions | None, beside: Mapping[str, Any]) -> StudyOptions:
    """The switches as asked for; None switches nothing off.

    Raises `ValueError` on a switch that is given beside `study`, and `TypeError` on what is no switch.
    """
    for name, value in beside.items():
        if name not in StudyOptions.__dataclass_fields__:
            raise TypeError(f"LLM: got an option that it does not have, {name}")
        wanted = f"study=StudyOptions({name}={value!r}), of rooflab.engine.study"
        raise ValueError(f"{name}: expected {wanted}, got it as an option of LLM")
    return study or StudyOptions()


class RecomputingCore(Core):
    """Computes every token again in every step."""

    def _step(self) -> list[Sequence]:
        got = super()._step()
        self.forget()
        return got
