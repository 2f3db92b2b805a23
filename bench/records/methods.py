"""How a time was read, as two readings must share it to be compared."""

from __future__ import annotations

import re


def method_of(timer: str | None, l2_state: str | None) -> str:
    """`cuda events, launch gaps hidden, cold`: the timing method and the state of L2, without the number of calls.

    How many calls share a sample follows from how fast the kernel is, so that each faster one would be read otherwise;
    that several do is told by the state of L2.
    """
    name = re.sub(r"\d+ calls per sample", "several calls per sample", timer or "unknown")
    return f"{name}, {l2_state}" if l2_state else name


def paired_method_of(timer: str | None, l2_state: str | None) -> str:
    """`method_of` without what was done about a CPU's threads.

    Processes of one kernel differ in it: with other work on the machine 2 of 12 did not find their threads to pin.  It
    adds noise to both sides alike.
    """
    return re.sub(r", threads (not )?pinned[^,]*", "", method_of(timer, l2_state))
