"""What each timing method reads of a kernel that does nothing."""

from __future__ import annotations

import numpy as np

from rooflab.bench.microkernels.microkernel import Load, Microkernel

SOURCE = 'extern "C" __global__ void nothing(unsigned int) {}'


def empty(load: Load) -> Microkernel:
    """One thread that returns at once; the shortest launch there is."""
    kernel = load(SOURCE, "nothing")

    def launch(repeats: int) -> None:
        kernel((1,), (1,), np.uint32(repeats))

    return Microkernel(
        limit="launch", config={}, unit="launch", work=1.0, launch=launch, wrong=lambda repeats: "", fixed_repeats=1
    )
