"""The ring of slots in shared memory between one warp that loads and warpgroups that multiply (Gluon, Hopper).

A slot is `full` when its bytes have arrived (an mbarrier counts them), and `empty` when a consumer's products of it are
done; there is one `empty` barrier for each consumer that reads the slot.  The phase is the parity of the barrier's
completion that a warp waits for next; it changes each time that the ring begins again.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The slot after `slot`, and its phase."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), phase ^ last.to(gl.int32)
