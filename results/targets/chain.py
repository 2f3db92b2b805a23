"""A kernel that only waits for memory: it gives the least time of kernels with dependent loads."""

from __future__ import annotations

import torch

from rooflab.bench.core.ceilings.microkernel import Load, Microkernel
from rooflab.bench.core.ceilings.streams import POISON_WORD

CHAIN_THREADS = 128
CHAIN_STEP = 2**18
"""The words between two loads of a thread: each load touches lines, pages and channels that are new to it."""
CHAIN = """
extern "C" __global__ void __launch_bounds__(THREADS) chain(const unsigned* next, unsigned* ends) {
    unsigned at = threadIdx.x;
#pragma unroll
    for (int load = 0; load < DEPTH; ++load) at = next[at];
    ends[threadIdx.x] = at;
}
"""


def chain(load: Load, device: torch.device, depth: int) -> Microkernel:
    """Makes a kernel of one CTA, whose threads do `depth` loads, each from the address that the last gave, and a store.

    The kernel's time is about the least time of any kernel with `depth` dependent loads and a store.
    Raises `ValueError` if `depth` is less than 1.
    """
    if depth < 1:
        raise ValueError(f"depth: expected at least 1, got {depth}")
    kernel = load(CHAIN, "chain", options=(f"-DTHREADS={CHAIN_THREADS}", f"-DDEPTH={depth}"))
    following = torch.arange(CHAIN_STEP, depth * CHAIN_STEP + CHAIN_THREADS, dtype=torch.int32, device=device)
    ends = torch.empty(CHAIN_THREADS, dtype=torch.int32, device=device)

    def launch(repeats: int) -> None:
        kernel((1,), (CHAIN_THREADS,), following, ends)

    def wrong(repeats: int) -> str:
        ends.fill_(POISON_WORD)
        launch(repeats)
        expected = depth * CHAIN_STEP + torch.arange(CHAIN_THREADS, dtype=torch.int32, device=device)
        found = int((ends != expected).sum())
        return f"{found} of {CHAIN_THREADS} threads did not end where their loads lead" if found else ""

    return Microkernel("dependent loads", {"depth": depth}, 1.0, launch, wrong)
