"""What the race detector is told of the barriers of CTAs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine.group import Group

Warps = npt.NDArray[np.int64]


def arrives(group: Group, slot: int, number: int, warps: Warps) -> None:
    """Warps arrive at a barrier and go on: what they do from now on is not ordered by it."""
    if group.races is not None:
        group.races.signal(group.race_slot(slot), warps % group.race_warps, ("barrier", slot, number))


def complete(group: Group, slot: int, number: int, waiters: Warps) -> None:
    """A barrier of one CTA is complete, at which `waiters` have waited."""
    if group.races is not None:
        own = np.unique(waiters % group.race_warps)
        group.races.barrier(group.race_slot(slot), own, ("barrier", slot, number))


def complete_for_all(group: Group, warps: Warps) -> None:
    """Every thread left is at a barrier of its CTA, where nobody has arrived before; `warps` by lane, in order."""
    if group.races is None:
        return
    each = warps[np.flatnonzero(np.diff(warps, prepend=-1))]
    per_cta = group.lanes_per_cta // 32
    ctas = each // per_cta
    if not group.run.has_clusters and len(each) == (ctas[-1] - ctas[0] + 1) * per_cta:
        group.races.barrier(np.arange(ctas[0], ctas[-1] + 1), each[:per_cta] % per_cta)
        return
    for cta in np.unique(ctas):
        group.races.barrier(group.race_slot(int(cta)), each[ctas == cta] % group.race_warps)
