"""Kernels for the floor (least time) of each timing method: an empty kernel, and one that only waits for memory."""

from __future__ import annotations

import numpy as np
import torch

from rooflab.bench.core.ceilings.microkernels.microkernel import Load, Microkernel, defines, source

SOURCE = 'extern "C" __global__ void nothing(unsigned int) {}'
CHAIN_THREADS = 128
CHAIN_STEP = 2**18
"""Words between two loads of a thread: each load touches memory lines, pages and channels that no earlier load did."""
POISON = -1


def empty(load: Load) -> Microkernel:
    """One thread that returns at once: the shortest possible launch."""
    kernel = load(SOURCE, "nothing")

    def launch(repeats: int) -> None:
        kernel((1,), (1,), np.uint32(repeats))

    return Microkernel(
        limit="launch", config={}, unit="launch", work=1.0, launch=launch, wrong=lambda repeats: "", fixed_repeats=1
    )


def chain(load: Load, device: torch.device, depth: int) -> Microkernel:
    """One CTA; each thread does `depth` dependent loads, each from the address that the last load gave, and one store.

    The kernel's time is about the least time of any kernel with `depth` dependent loads and a store.
    Raises `ValueError` if `depth` is less than 1.
    """
    if depth < 1:
        raise ValueError(f"depth: expected at least 1, got {depth}")
    kernel = load(source("chain"), "chain", options=defines(THREADS=CHAIN_THREADS, DEPTH=depth))
    following = torch.arange(CHAIN_STEP, depth * CHAIN_STEP + CHAIN_THREADS, dtype=torch.int32, device=device)
    ends = torch.empty(CHAIN_THREADS, dtype=torch.int32, device=device)

    def launch(repeats: int) -> None:
        kernel((1,), (CHAIN_THREADS,), following, ends)

    def wrong(repeats: int) -> str:
        ends.fill_(POISON)
        launch(repeats)
        expected = depth * CHAIN_STEP + torch.arange(CHAIN_THREADS, dtype=torch.int32, device=device)
        found = int((ends != expected).sum())
        return f"{found} of {CHAIN_THREADS} threads did not end where their loads lead" if found else ""

    return Microkernel(
        limit="dependent loads",
        config={"threads": CHAIN_THREADS, "depth": depth},
        unit="launch",
        work=1.0,
        launch=launch,
        wrong=wrong,
        cold=True,
        fixed_repeats=1,
    )
