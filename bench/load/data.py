"""Makes prompts and the lengths of answers for requests, from one random seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

DATA_KINDS = ("random", "sharegpt", "prefix")
# ShareGPT's mean lengths by vLLM's paper (arXiv 2309.06180, figure 11).  The figure gives no number for the spread: the
# sigmas are our choice, with which 1% of the prompts pass 1,024 tokens.  The bounds are those of vLLM's and SGLang's
# loaders.
SHAREGPT_MEANS = (161.31, 337.99)
SHAREGPT_SIGMAS = (1.0, 0.8)
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048
# Short and frequent words: with a blank before it, each word is one token of most vocabularies.
VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


@dataclass(frozen=True)
class Prompt:
    """Holds one prompt and the requested length of its answer."""

    content: str | list[int]
    """The text, or the token ids."""
    tokens: int | None
    """The number of tokens of the content; None for a text, whose tokens the server counts."""
    output_tokens: int


@dataclass(frozen=True)
class Data:
    """Makes prompts with the given lengths.  Raises `ValueError` on a length below 1."""

    kind: str = "random"
    input_len: tuple[int, int] = (128, 128)
    """The least and the most tokens of a prompt without its prefix; lengths are uniform between the two."""
    output_len: tuple[int, int] = (64, 64)
    prefix_len: int = 256
    groups: int = 4
    """The number of prefixes.  All prompts of a group share one prefix."""
    ids: tuple[int, int] | None = (100, 1000)
    """The range of random token ids: below most special tokens, and within any vocabulary.  None for text."""

    def __post_init__(self) -> None:
        if self.kind not in DATA_KINDS:
            raise ValueError(f"data: expected one of {', '.join(DATA_KINDS)}, got {self.kind!r}")
        for name in ("input_len", "output_len", "ids"):
            min_length, max_length = getattr(self, name) or (1, 1)
            if not (name == "ids" or min_length >= 1) or not 0 <= min_length <= max_length:
                raise ValueError(f"{name}: expected N or LEAST:MOST, of at least 1, got {min_length}:{max_length}")
        for name in ("prefix_len", "groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Yields prompts without end, drawn at random with `seed`."""
        rng = np.random.default_rng(seed)
        prefixes = [self._content(self.prefix_len, rng) for _ in range(self.groups if self.kind == "prefix" else 0)]
        while True:
            tokens, answer_tokens = self._lengths(rng)
            content = self._content(tokens, rng)
            if prefixes:
                content = prefixes[rng.integers(self.groups)] + content
            if self.ids is None:
                yield Prompt(" ".join(VOCABULARY[index] for index in content), None, answer_tokens)
            else:
                yield Prompt(content, len(content), answer_tokens)

    def _content(self, tokens: int, random: np.random.Generator) -> list[int]:
        """Returns `tokens` random numbers: token ids in the range `self.ids`, else indices in `VOCABULARY`."""
        first_token_id, last_token_id = self.ids or (0, len(VOCABULARY) - 1)
        return [int(token) for token in random.integers(first_token_id, last_token_id + 1, size=tokens)]

    def _lengths(self, random: np.random.Generator) -> tuple[int, int]:
        if self.kind != "sharegpt":
            prompt, answer = (int(random.integers(low, high + 1)) for low, high in (self.input_len, self.output_len))
            return prompt, answer
        while True:
            prompt, answer = (
                int(random.lognormal(math.log(mean_tokens) - log_sigma**2 / 2, log_sigma))
                for mean_tokens, log_sigma in zip(SHAREGPT_MEANS, SHAREGPT_SIGMAS, strict=True)
            )
            if min(prompt, answer) >= MIN_TOKENS and prompt <= MAX_PROMPT_TOKENS and prompt + answer <= MAX_TOKENS:
                return prompt, answer
