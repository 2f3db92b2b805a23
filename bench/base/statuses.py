"""The exit statuses of the commands."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit status of a command.  If several statuses apply, the command ends with the first one in this class."""

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
        """The member of `statuses` that comes first in this class."""
        return next((status for status in cls if status in statuses), cls.DONE)
