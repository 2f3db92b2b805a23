"""Which SM has which tile of attention's queries, and when: computed from the order in which a kernel deals its tiles,
or on a GPU from timestamps that the kernel writes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels.flash_attention import persistent
from rooflab.kernels.flash_attention._launch import section_heads
from rooflab.kernels.flash_attention._timeline import NEVER, kept_in, new_timeline
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, Inputs, Scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.occupancy import occupancy

OP = "flash_attention"
BLOCK = 128
"""Rows and keys of one unit of work."""
TIMED = ("tma", "persistent", "ping_pong")
"""Kernels that write timestamps."""
META = torch.device("meta")
Basis = Literal["schedule", "timestamps"]


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
    basis: Basis
    sms: int
    ctas_per_sm: int
    tiles: tuple[Tile, ...]

    @property
    def unit(self) -> str:
        """Unit of the starts and ends."""
        return "blocks of 128 x 128 scores" if self.basis == "schedule" else "us"

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
    inputs = _inputs(name, case, scheme, META, 0)
    shape = _shape(name, case, scheme, inputs["k"], sms, get_kernel(OP, name).config_for(case, scheme, META))
    tiles = tuple(_ORDERS[name](shape))
    return TileSchedule(name, "schedule", sms, shape.ctas_per_sm, tiles)


def _inputs(name: str, case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    kernel, inputs = get_kernel(OP, name), get_op(OP).make_inputs(case, scheme, device, seed)
    refusal = kernel.why_not_args(inputs)
    if refusal:
        raise ValueError(f"case: {kernel.id}: {refusal}")
    return inputs


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
            tile = persistent.nth_tile.fn(turn, cta, ctas)
            if tile < count:
                row, head = persistent.place.fn(
                    tile, shape.tiles_m, shape.heads, shape.section, bool(shape.case["causal"])
                )
                end = now + shape.work(row)
                yield Tile(_lane(cta, shape), now, end, row, head, shape.work(row))
                now = end


def _lane(cta: int, shape: _Shape) -> int:
    """The place of CTA `cta` among the CTAs that run at once: each SM gets one before any SM gets a second."""
    return cta % shape.sms * shape.ctas_per_sm + cta // shape.sms


_ORDERS: Mapping[str, Callable[[_Shape], Iterable[Tile]]] = {"tma": _by_rows, "persistent": _dealt, "ping_pong": _dealt}


def timed(name: str, case: Case, scheme: Scheme, device: torch.device, seed: int = 0) -> TileSchedule:
    """When and on which SM each tile ran, in the second of two launches; microseconds from the first tile's start.

    Raises `ValueError` on a kernel that writes no timestamps, or on a case that it does not take.
    """
    if name not in TIMED:
        raise ValueError(f"kernel: expected one that keeps timestamps ({', '.join(TIMED)}), got {name!r}")
    inputs = _inputs(name, case, scheme, device, seed)
    # The launch's own config, which a record may have chosen for this card: a timeline has one row per tile of it.
    kernel = get_kernel(OP, name)
    config = kernel.config_for(case, scheme, device)
    shape = _shape(name, case, scheme, inputs["k"], sm_count(device), config)
    for _ in range(2 if device.type == "cuda" else 1):
        timeline = new_timeline(shape.tiles_m * shape.heads, device)
        with kept_in(timeline):
            kernel.fn(**inputs, config=config)
    return _read(name, shape, timeline.tolist())


def _read(name: str, shape: _Shape, rows: Sequence[Sequence[int]]) -> TileSchedule:
    """Converts the rows of a timeline to tiles.  Raises `ValueError` if a tile never ran."""
    missing = [number for number, row in enumerate(rows) if NEVER in row]
    if missing:
        raise ValueError(f"timeline: expected every tile to have run, got none of {len(missing)}, first {missing[0]}")
    began = min(row[1] for row in rows)
    lanes: dict[int, list[int]] = {}
    tiles = []
    # Sorted by the end too: a tile shorter than one timer step ends when the next tile begins.
    for number in sorted(range(len(rows)), key=lambda number: tuple(rows[number][1:])):
        sm, start, end = rows[number]
        busy = lanes.setdefault(sm, [])
        # CTAs that share an SM differ only in their times.
        place = next((place for place, until in enumerate(busy) if until <= start), len(busy))
        busy[place : place + 1] = [end]
        head, row = divmod(number, shape.tiles_m)
        tiles.append((sm, place, (start - began) / 1e3, (end - began) / 1e3, row, head))
    held = max(len(busy) for busy in lanes.values())
    found = tuple(
        Tile(sm * held + place, start, end, row, head, shape.work(row)) for sm, place, start, end, row, head in tiles
    )
    return TileSchedule(name, "timestamps", shape.sms, held, found)
