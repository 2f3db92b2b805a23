"""The configs of sample: what a CTA needs, and at the end a row of defaults for each rung."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

THRESHOLDS = 16
"""Keys that a step of the search compares at once."""
ADDRESS_REGISTERS = 32
"""For the row's settings, pointers and masks, in addition to the accumulator of the search."""
THREADS = 512
FEW_THREADS = 128
"""For a part of at most `FEW_TOKENS`: fewer sums to add up."""
FEW_TOKENS = 2048
OWN_BYTES = 12 * 1024
"""Static shared memory: sums, and the tokens at the end of a search."""
MAX_CLUSTER = 8
AIMED_SHARE = 16 * 1024
"""Tokens of a CTA at which two CTAs share an SM, as 64 registers a thread allow: one row is loaded while another is
searched."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """One way to launch the kernel."""

    block: int
    """Tokens per step of the other passes."""
    search_block: int
    """Tokens per step of the search."""
    num_warps: int


def _blocks(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Blocks of 2 to 16 tokens per thread; for the search 1 to 8."""
    return tuple(
        Config(block, search_block, num_warps)
        for block, search_block, num_warps in itertools.product((512, 1024, 2048, 4096), (256, 512, 1024), (4, 8, 16))
        if 2 <= block // (32 * num_warps) <= 16 and 1 <= search_block // (32 * num_warps) <= 8
    )


def _searched(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """The accumulator of the search (a sum per token and threshold), or the other passes' best values."""
    threads = 32 * config.num_warps
    held = max(THRESHOLDS * config.search_block, 2 * config.block)
    return Footprint(threads, cdiv(held, threads) + ADDRESS_REGISTERS, 0, int(case["B"]))


def _one_block(case: Case, scheme: Scheme = BF16) -> Config:
    """One config for every case: in the search 32 registers of a thread hold its tokens and 16 thresholds."""
    return Config(block=1024, search_block=512, num_warps=8)


@dataclass(frozen=True)
class ClusterConfig:
    """One way to launch the kernel."""

    cluster: int
    """CTAs that share a row."""
    threads: int
    """Threads of a CTA."""


def share_of(V: int, cluster: int) -> int:
    """Tokens of a CTA: whole vectors, calls of Philox and words of the mask."""
    return int(cdiv(V, 32 * cluster)) * 32


def _clusters(case: Case, scheme: Scheme = BF16) -> tuple[ClusterConfig, ...]:
    """Clusters of 1 to 8 CTAs; legal are those whose shared memory holds the row."""
    return tuple(itertools.starmap(ClusterConfig, itertools.product((1, 2, 4, 8), (128, 256, 512))))


def _held(config: ClusterConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """The row's part in shared memory; seven thresholds, their sums and four vectors in flight in registers."""
    shared = 4 * share_of(int(case["V"]), config.cluster) + OWN_BYTES
    return Footprint(config.threads, 40, shared, int(case["B"]) * config.cluster)


def _few_ctas(case: Case, scheme: Scheme = BF16) -> ClusterConfig:
    """As few CTAs as hold the row and leave room for other rows; more, while SMs are idle and a CTA has much to do."""
    B, V = int(case["B"]), int(case["V"])
    cluster = 1
    while cluster < MAX_CLUSTER and (
        share_of(V, cluster) > AIMED_SHARE or (B * cluster < HOPPER_SMS and share_of(V, cluster) > 4 * THREADS)
    ):
        cluster *= 2
    return ClusterConfig(cluster, FEW_THREADS if share_of(V, cluster) <= FEW_TOKENS else THREADS)


BISECT = Tuning(Config, _blocks, _one_block, _searched)
CLUSTER = Tuning(ClusterConfig, _clusters, _few_ctas, _held)
