"""Switches for single studies: a study turns off one part of the engine, to measure what that part brings."""

from __future__ import annotations

from dataclasses import dataclass

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


class RecomputingCore(Core):
    """Computes every token again in every step."""

    def _step(self) -> list[Sequence]:
        got = super()._step()
        self.forget()
        return got
