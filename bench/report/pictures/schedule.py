"""Which SM has which tile of attention's queries, and when: from the order in which a kernel deals its tiles."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.lib.attention_gluon import nth_tile, place, section_heads
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.occupancy import occupancy

OP = "flash_attention"
BLOCK = 128
"""Rows and keys of one unit of work."""
META = torch.device("meta")
UNIT = "blocks of 128 x 128 scores"
"""Unit of starts and ends."""


@dataclass(frozen=True)
class Tile:
    """One tile of queries of one head, on one place of an SM."""

    lane: int
    """Index of the place: the SM times the CTAs that it holds, plus the index of the CTA on the SM."""
    start: float
    end: float
    row: int
    """Index of the tile along the query rows."""
    head: int
    work: float
    """Blocks of 128 by 128 scores."""


@dataclass(frozen=True)
class TileSchedule:
    """All tiles of a launch."""

    kernel: str
    sms: int
    ctas_per_sm: int
    tiles: tuple[Tile, ...]

    @property
    def span(self) -> float:
        """When the last tile ends."""
        return max((tile.end for tile in self.tiles), default=0.0)

    @property
    def mean(self) -> float:
        """Average busy time of a place, over all places of the SMs."""
        return sum(tile.end - tile.start for tile in self.tiles) / (self.sms * self.ctas_per_sm)

    @property
    def imbalance(self) -> float:
        """The last end over the mean: 1 if all SMs end together and no SM ever waits."""
        return self.span / self.mean if self.tiles else 1.0


@dataclass(frozen=True)
class _Shape:
    """A launch on a case."""

    case: Case
    config: Any
    tiles_m: int
    heads: int
    section: int
    sms: int
    ctas_per_sm: int

    def work(self, row: int) -> float:
        """Work of a tile, including the keys of its last block that no query sees."""
        T, S, window = int(self.case["T"]), int(self.case["S"]), self.case.get("window")
        block_m, block_n = self.config.block_m, self.config.block_n
        first, last = row * block_m, min((row + 1) * block_m, T) - 1
        end = max(0, min(S, last + 1 + S - T)) if self.case["causal"] else S
        begin = 0 if window is None else max(0, first + S - T + 1 - int(window))
        blocks = max(1, -(-max(0, end - begin) // block_n))
        return float(blocks * block_n * block_m / BLOCK**2)


def planned(name: str, case: Case, scheme: Scheme, sms: int = HOPPER_SMS) -> TileSchedule:
    """The order in which a kernel deals its tiles, without timing: a block of scores takes 1, everything else takes 0.

    Raises `ValueError` on a kernel whose order this module does not know, and on a case that the kernel does not take.
    """
    if name not in _ORDERS:
        raise ValueError(f"kernel: expected one of {', '.join(_ORDERS)}, got {name!r}")
    kernel, inputs = get_kernel(OP, name), get_op(OP).make_inputs(case, scheme, META, 0)
    if refusal := kernel.why_not_args(inputs):
        raise ValueError(f"case: {kernel.id}: {refusal}")
    shape = _shape(name, case, scheme, inputs["k"], sms, kernel.config_for(case, scheme, META))
    return TileSchedule(name, sms, shape.ctas_per_sm, tuple(_ORDERS[name](shape)))


def _shape(name: str, case: Case, scheme: Scheme, k: torch.Tensor, sms: int, config: Any) -> _Shape:
    kernel = get_kernel(OP, name)
    tuning, heads = kernel.tuning, int(case["B"]) * int(case["H"])
    assert tuning is not None and tuning.footprint is not None  # all kernels of `_ORDERS` have both
    needs = tuning.footprint(config, case, scheme)
    held = occupancy(get_device("h100-sxm"), needs.threads, needs.registers, needs.shared_bytes).ctas_per_sm
    in_section = section_heads(k, int(case["H"]) // int(case["H_kv"])) if name in ("persistent", "ping_pong") else heads
    return _Shape(
        case=case,
        config=config,
        tiles_m=-(-int(case["T"]) // config.block_m),
        heads=heads,
        section=min(heads, in_section),
        sms=sms,
        ctas_per_sm=getattr(config, "ctas_per_sm", 1 if name == "ping_pong" else max(1, held)),
    )


def _by_rows(shape: _Shape) -> Iterable[Tile]:
    """One CTA for each tile, the rows of a head in sequence: the first free place takes the next tile."""
    free = [(0.0, _lane(cta, shape)) for cta in range(shape.sms * shape.ctas_per_sm)]
    heapq.heapify(free)
    for tile in range(shape.tiles_m * shape.heads):
        start, lane = heapq.heappop(free)
        head, row = divmod(tile, shape.tiles_m)
        end = start + shape.work(row)
        heapq.heappush(free, (end, lane))
        yield Tile(lane, start, end, row, head, shape.work(row))


def _dealt(shape: _Shape) -> Iterable[Tile]:
    """Persistent CTAs, dealt by the kernel's own arithmetic, which also runs on Python's integers."""
    count = shape.tiles_m * shape.heads
    ctas = min(count, shape.sms * shape.ctas_per_sm)
    for cta in range(ctas):
        now = 0.0
        for turn in range(-(-count // ctas)):
            tile = nth_tile.fn(turn, cta, ctas)
            if tile < count:
                row, head = place.fn(tile, shape.tiles_m, shape.heads, shape.section, bool(shape.case["causal"]))
                end = now + shape.work(row)
                yield Tile(_lane(cta, shape), now, end, row, head, shape.work(row))
                now = end


def _lane(cta: int, shape: _Shape) -> int:
    """The place of CTA `cta` among the CTAs that run at once: each SM gets one before any SM gets a second."""
    return cta % shape.sms * shape.ctas_per_sm + cta // shape.sms


_ORDERS: Mapping[str, Callable[[_Shape], Iterable[Tile]]] = {"tma": _by_rows, "persistent": _dealt, "ping_pong": _dealt}
