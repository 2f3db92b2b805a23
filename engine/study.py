"""Defines switches that turn off one part of the engine, so that a study can measure the effect of that part."""

from __future__ import annotations

from dataclasses import dataclass

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


class RecomputingCore(Core):
    """Runs the engine like `Core`, but computes every token again in every step."""

    def _step(self) -> list[Sequence]:
        sequences = super()._step()
        self.forget()
        return sequences
