"""What can go wrong while a kernel runs."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """The kernel did what a GPU would not forgive, or would forgive in silence; the text names the source line."""


class Fault(Exception):
    """Raised inside an instruction; whoever runs the block makes an `EmulationError` of it.

    `lane` is the one that did it, counted through the group of CTAs; None where it is not known.
    """

    def __init__(self, text: str, instruction: int, lane: int | None = None):
        super().__init__(text)
        self.instruction = instruction
        self.lane = lane
