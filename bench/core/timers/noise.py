"""When a reading is NOISY: its median says little, because the machine did other work or the samples are few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WAITING = 0.05
"""Highest ratio of the time that threads waited for a processor to the time that they ran.

On a quiet 2-core EPYC 0.001 to 0.01; with one of the two cores busy 0.34 to 0.47, with both busy 1.0.
"""
SPREAD = 2.0
"""Highest ratio of the 80th percentile to the 20th: 1.05 to 1.7 there when quiet, up to 200 with both cores busy.

It also finds what the threads' waiting cannot: other guests of the same host, and other work on a GPU.
"""
DRIFT = 1.5
"""Highest ratio, up or down, of the later half's median to the earlier half's: up to 1.4 there when quiet."""
FEWEST = 0.25
"""Lowest share of the samples that the reading's time has room for: its time divided by the median sample.

A first call of 300 ms in a budget of 150 ms left 5 of 80, and their median was 6% too long.
"""


def few(samples: int, room: int) -> str:
    """Why a reading has too few samples, in one sentence; empty if it has not."""
    if samples >= FEWEST * room:
        return ""
    return f"it has {samples} samples, and its time has room for {room}: some calls were far slower than the others"


def noise(seconds: Sequence[float], waiting: float | None) -> str:
    """Why samples in time order are noise, in one sentence; empty if they are not.

    `waiting` is the time that the process's threads waited for a processor, over the time that they ran; None if the
    system does not tell.  Without samples only that decides.
    """
    if waiting is not None and waiting > WAITING:
        return f"other processes were running: for each second of work, the threads waited {waiting:.2f} s for a core"
    if not len(seconds):
        return ""
    p20, p80 = np.percentile(seconds, (20, 80))
    if p80 > SPREAD * p20:
        return f"the samples' 80th percentile is {p80 / p20:.2g} times their 20th" if p20 > 0 else "a sample is zero"
    half = len(seconds) // 2
    early, late = (float(np.median(part)) for part in (seconds[: half or 1], seconds[half:]))
    if max(early, late) > DRIFT * min(early, late):
        return f"the median of the later half of the samples is {late / early:.2g} times that of the earlier half"
    return ""
