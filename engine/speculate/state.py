"""What a sequence keeps of its drafts, from step to step."""

from __future__ import annotations

from dataclasses import dataclass

PAUSE, LONGEST_PAUSE = 16, 256
"""Tokens until a sequence drafts again, at first, and after each try that failed twice as many, up to the longest."""


@dataclass(slots=True)
class Odds:
    """How often a sequence's drafts were accepted, lately, with a hopeful beginning."""

    accepted: float = 1.5
    tried: float = 2.0
    """Drafted tokens that were compared: the accepted ones, and the first that was not."""
    length: int = 0
    resumes: int = 0
    """The number of tokens at which the sequence drafts again."""
    pause: int = PAUSE


class Places:
    """Where each pair of successive tokens of a sequence was last followed by another token."""

    def __init__(self) -> None:
        self.behind: dict[tuple[int, int], int] = {}
        self.older: dict[int, int] = {}
        """Of such a place the one where the same pair came before."""
        self.known = 1
        """Of pairs that end before this place."""
