"""Defines the interface of drafters, the options of speculation, and the counts of a step's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rooflab.engine.model import StepInput
from rooflab.engine.scheduler import Step
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.lengths import Lengths

DRAFT_SOURCES = {"ngram": "nothing", "draft": "a model", "eagle": "a folder of a head"}
"""The kinds of drafts.  The value says what the option `draft` must name."""
MOST_DRAFT_TOKENS = 16
"""The most tokens of one draft."""


class Drafter:
    """Defines the interface of drafters.  This base class proposes no tokens."""

    reads_hidden = False
    """Whether the drafter needs the hidden states of the model's steps."""

    def wants(self, rows: Sequence[EngineSequence], lengths: Lengths) -> list[tuple[EngineSequence, int]]:
        """Returns the decoding sequences that should get a draft, each with the number of tokens to draft."""
        return [(sequence, draft_length) for sequence in rows if (draft_length := lengths.of(sequence))]

    def draft(self, drafting: Sequence[tuple[EngineSequence, int]]) -> dict[EngineSequence, list[int]]:
        """Returns a draft for each sequence in `drafting`: at least one token, at most the number in `drafting`."""
        return {}

    def allocate(self, num_blocks: int) -> None:
        """Allocates the pages of the drafter's own KV cache, if it has a cache."""

    def follow(
        self, step: Step, inputs: StepInput, decoding: Sequence[EngineSequence], hidden: torch.Tensor | None
    ) -> None:
        """Receives the tensors of each step after the model's forward pass. The order of their rows is: sequences
        without a draft, sequences with a draft, prompts. `decoding` lists the sequences in this order, without prompts.
        If `reads_hidden` is True, `hidden` holds the hidden states of all rows."""

    def accepted(self, sequences: Sequence[EngineSequence], counts: Sequence[int], states: torch.Tensor) -> None:
        """Receives the number of new tokens of each sequence before they are appended.  The last new token was drawn
        from the hidden state in `states` `[sequences, H]`.  Called only if `reads_hidden` is True."""


@dataclass(frozen=True)
class Speculation:
    """Holds the options of speculative decoding.  Raises `ValueError` on an unknown kind or a number out of range."""

    kind: str
    num_tokens: int = 4
    draft: str | Path | None = None

    def __post_init__(self) -> None:
        if self.kind not in DRAFT_SOURCES:
            raise ValueError(f"speculate: expected {', '.join(DRAFT_SOURCES)}, got {self.kind!r}")
        no_draft = self.kind == "ngram"
        if (self.draft is None) != no_draft or str(self.draft).isdigit():  # a number meant the model's first layers
            raise ValueError(
                f"draft: expected {DRAFT_SOURCES[self.kind]} with speculate={self.kind}, got {self.draft!r}"
            )
        if type(self.num_tokens) is not int or not 1 <= self.num_tokens <= MOST_DRAFT_TOKENS:
            raise ValueError(f"num_speculative_tokens: expected 1 to {MOST_DRAFT_TOKENS}, got {self.num_tokens!r}")

    def rows(self, max_model_len: int) -> int:
        """Returns the most rows of a sequence in a step.  Raises `ValueError` if a draft exceeds `max_model_len`."""
        if self.num_tokens > max_model_len - 2:
            max_text = f"{max_model_len - 2}, with a token before and one behind it in max_model_len ({max_model_len})"
            raise ValueError(f"num_speculative_tokens: expected at most {max_text}, got {self.num_tokens}")
        return 1 + self.num_tokens


def speculation(
    kind: str | None, num_tokens: int, draft: str | Path | None, kv_cache: bool, overlap: bool | None
) -> Speculation | None:
    """Returns the options of speculation, or None if `kind` is None.  Raises `ValueError` if options conflict."""
    if kind is None:
        if draft is not None:
            raise ValueError(f"draft: expected speculate with it, got {draft!r} alone")
        return None
    if overlap or not kv_cache:
        actual_option = "overlap=True, which reads no token before the next step" if overlap else "kv_cache=False"
        raise ValueError(f"speculate: expected a KV cache, and tokens that are read at once, got {actual_option}")
    return Speculation(kind, num_tokens, draft)


@dataclass(slots=True)
class Speculated:
    """Counts the drafted and the accepted tokens of a step, and holds the seconds of each part of the step."""

    accepted: list[int]
    """For each position in a draft, the number of tokens that were accepted there."""
    draft_s: float = 0.0
    """The seconds to choose sequences and to make their drafts."""
    verify_s: float = 0.0
    """The seconds of the model's run and its draw."""
    accept_s: float = 0.0
    drafts: int = 0
    drafted: int = 0
    """The number of tokens of all drafts."""

    def note(self, drafted: int, accepted: int) -> None:
        """Counts a draft of `drafted` tokens.  The model accepted its first `accepted` tokens."""
        self.drafts += 1
        self.drafted += drafted
        for draft_position in range(accepted):
            self.accepted[draft_position] += 1
