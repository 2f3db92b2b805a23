"""Defines the exit statuses of the commands."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum


class ExitStatus(IntEnum):
    """Lists the exit statuses of a command.  If several statuses apply, the first one in this class wins."""

    USAGE = 2
    INTERRUPTED = 130
    BROKEN = 14
    """A kernel has broken the CUDA context.  A fresh process must do the remaining work."""
    INCORRECT = 11
    INVALID = 13
    SLOWER = 10
    UNDECIDED = 12
    DONE = 0

    @classmethod
    def first(cls, statuses: Collection[int]) -> ExitStatus:
        """Returns the member of `statuses` that comes first in this class."""
        return next((status for status in cls if status in statuses), cls.DONE)
