"""Which SM computes which tile of attention's queries, and when, from the order in which a kernel deals its tiles."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.lib.attention_gluon import nth_tile, place, section_heads
from rooflab.kernels.registry import Kernel, get_kernel, get_op
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.occupancy import occupancy

OP = "flash_attention"
BLOCK = 128
"""The number of rows, and of keys, in one unit of work."""
META = torch.device("meta")
UNIT = "blocks of 128 x 128 scores"
"""The unit of starts and ends."""


@dataclass(frozen=True)
class Tile:
    """One tile of queries of one head, at one CTA's place on an SM."""

    lane: int
    """The index of the place: the SM times the number of CTAs that it holds, plus the index of the CTA on the SM."""
    start: float
    end: float
    row: int
    """The index of the tile along the query rows."""
    head: int

    @property
    def work(self) -> float:
        """The work in blocks of 128 by 128 scores."""
        return self.end - self.start


@dataclass(frozen=True)
class TileSchedule:
    """All tiles of a launch, with their times."""

    kernel: str
    sms: int
    ctas_per_sm: int
    tiles: tuple[Tile, ...]

    @property
    def span(self) -> float:
        """The time when the last tile ends."""
        return max((tile.end for tile in self.tiles), default=0.0)

    @property
    def mean(self) -> float:
        """The average busy time of a place, over all places of the SMs."""
        return sum(tile.work for tile in self.tiles) / (self.sms * self.ctas_per_sm)

    @property
    def imbalance(self) -> float:
        """The ratio of the last end to the mean: 1 if all SMs end together and no SM ever waits."""
        return self.span / self.mean if self.tiles else 1.0


ORDERS = ("tma", "persistent", "ping_pong")
"""Kernels of known order: a grid, whose first free place takes the next tile, and two kernels of persistent CTAs."""


def planned(name: str, case: Case, scheme: Scheme, sms: int = HOPPER_SMS) -> TileSchedule:
    """The order in which a kernel deals its tiles, without timing: a block of scores takes 1, all other work takes 0.

    Raises `ValueError` on a kernel whose order this module does not know, and on a case that the kernel does not take.
    """
    if name not in ORDERS:
        raise ValueError(f"kernel: expected one of {', '.join(ORDERS)}, got {name!r}")
    kernel, inputs = get_kernel(OP, name), get_op(OP).make_inputs(case, scheme, META, 0)
    if refusal := kernel.why_not_args(inputs):
        raise ValueError(f"case: {kernel.id}: {refusal}")
    config = kernel.config_for(case, scheme, META)
    work = [_work(case, config, row) for row in range(-(-int(case["T"]) // config.block_m))]
    ctas_per_sm = 1 if name == "ping_pong" else getattr(config, "ctas_per_sm", 0) or _held(kernel, config, case, scheme)
    heads, ctas = int(case["B"]) * int(case["H"]), sms * ctas_per_sm
    # At first each SM gets one CTA before any SM gets a second.
    lanes = [cta % sms * ctas_per_sm + cta // sms for cta in range(ctas)]
    if name == "tma":
        tiles = list(_by_rows(work, heads, lanes))
    else:
        section = min(heads, section_heads(inputs["k"], int(case["H"]) // int(case["H_kv"])))
        tiles = list(_dealt(work, heads, lanes, section, bool(case["causal"])))
    return TileSchedule(name, sms, ctas_per_sm, tuple(tiles))


def _work(case: Case, config: Any, row: int) -> float:
    """The blocks of scores of a tile, including the keys of its last block that no query sees."""
    T, S, window = int(case["T"]), int(case["S"]), case.get("window")
    first, last = row * config.block_m, min((row + 1) * config.block_m, T) - 1
    end = max(0, min(S, last + 1 + S - T)) if case["causal"] else S
    begin = 0 if window is None else max(0, first + S - T + 1 - int(window))
    blocks = max(1, -(-max(0, end - begin) // config.block_n))
    return float(blocks * config.block_n * config.block_m / BLOCK**2)


def _held(kernel: Kernel, config: Any, case: Case, scheme: Scheme) -> int:
    """The number of CTAs that an SM holds."""
    tuning = kernel.tuning
    assert tuning is not None and tuning.footprint is not None  # all kernels of `ORDERS` have both
    needs = tuning.footprint(config, case, scheme)
    return max(1, occupancy(get_device("h100-sxm"), needs.threads, needs.registers, needs.shared_bytes).ctas_per_sm)


def _by_rows(work: Sequence[float], heads: int, lanes: Sequence[int]) -> Iterator[Tile]:
    """Places one CTA for each tile, the rows of a head in sequence: the first free place takes the next tile."""
    free = [(0.0, lane) for lane in lanes]
    heapq.heapify(free)
    for head in range(heads):
        for row, blocks in enumerate(work):
            start, lane = heapq.heappop(free)
            heapq.heappush(free, (start + blocks, lane))
            yield Tile(lane, start, start + blocks, row, head)


def _dealt(work: Sequence[float], heads: int, lanes: Sequence[int], section: int, causal: bool) -> Iterator[Tile]:
    """Deals the tiles to persistent CTAs by the kernel's own arithmetic, which also runs on Python's integers."""
    count = len(work) * heads
    for cta, lane in enumerate(lanes[:count]):
        now, ctas = 0.0, min(count, len(lanes))
        for turn in range(-(-count // ctas)):
            tile = nth_tile.fn(turn, cta, ctas)
            if tile < count:
                row, head = place.fn(tile, len(work), heads, section, causal)
                yield Tile(lane, now, now + work[row], row, head)
                now += work[row]
