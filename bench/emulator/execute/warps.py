"""Runs instructions that move values between the lanes of a warp (PTX ISA 8.7, sections 9.7.9.6, 9.7.13.9 to 14)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.memory import POISON
from rooflab.bench.emulator.numbers.bits import REDUCTION_UFUNCS

WARP = 32
_BIT_POSITIONS = np.arange(WARP, dtype=np.uint64)
_NEUTRAL_VALUES = {"add": 0, "and": -1, "or": 0, "xor": 0}


def in_warps(c: LaneContext, value: Any, absent: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp] | None]:
    """Reshapes a value with one element per lane to `[warps, 32]`.  Missing lanes are filled with the byte `absent`.

    Also returns each lane's index in the flattened array, or None if all warps are complete and in order."""
    lane_values = c.vector(value)
    lane_index = _places(c)
    if lane_index is None:
        return lane_values.reshape(-1, WARP), None
    padded_count = (int(lane_index.max()) // WARP + 1) * WARP
    padded_values = np.full(padded_count * lane_values.itemsize, absent, np.uint8).view(lane_values.dtype)
    padded_values[lane_index] = lane_values
    return padded_values.reshape(-1, WARP), lane_index


def _places(c: LaneContext) -> npt.NDArray[np.intp] | None:
    if not c.warps_known:
        c.warps_known = True
        _, warp_index = np.unique(c.warps, return_inverse=True)
        lane_index = warp_index * WARP + (c.lanes & (WARP - 1))
        is_full = c.size == (int(lane_index[-1]) // WARP + 1) * WARP and bool((lane_index == np.arange(c.size)).all())
        c.warp_places = None if is_full else lane_index
    return c.warp_places


def present(c: LaneContext) -> npt.NDArray[np.bool_]:
    """Returns a mask `[warps, 32]` of the lanes that run together."""
    return in_warps(c, np.ones(c.size, np.bool_))[0]


def _back(rows: npt.NDArray[Any], places: npt.NDArray[np.intp] | None) -> npt.NDArray[Any]:
    flat_values = rows.reshape(-1)
    return flat_values if places is None else flat_values[places]


@lru_cache(maxsize=1024)
def _sources(mode: str, lane: int, clamp: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    reader_lanes = np.arange(WARP)
    return _source_lanes(mode, reader_lanes, np.full(WARP, lane), clamp)


def _source_lanes(mode: str, readers: Any, lane: Any, clamp: Any) -> tuple[Any, Any]:
    """Returns the lane from which each lane of a shuffle reads. Also returns whether this source is in range (PTX ISA,
    `shfl.sync`)."""
    segment_mask = clamp >> 8 & 31
    max_lane = clamp & 31
    lowest_lane = readers & segment_mask
    highest_lane = lowest_lane | max_lane & ~segment_mask & 31
    lane = lane & 31
    if mode == "up":
        source_lane = readers - lane
    elif mode == "down":
        source_lane = readers + lane
    elif mode == "bfly":
        source_lane = readers ^ lane
    else:
        source_lane = lowest_lane | lane & ~segment_mask & 31
    is_valid = source_lane >= highest_lane if mode == "up" else source_lane <= highest_lane
    return np.where(is_valid, source_lane, readers), is_valid


def shuffle(c: LaneContext, mode: str, value: Any, lane: Any, clamp: Any, wants_valid: bool) -> tuple[Any, Any]:
    """Runs `shfl.sync`: returns the values of the source lanes, and whether each source lane is in range."""
    c.group.order_lanes(c.lanes)
    is_uniform = isinstance(lane, np.generic) and isinstance(clamp, np.generic)
    if isinstance(value, np.generic):
        if not wants_valid:
            return value, None
        if is_uniform:
            return value, _sources(mode, int(lane), int(clamp))[1][c.lanes & (WARP - 1)]
    rows, indices = in_warps(c, value, POISON)
    if is_uniform:
        source_columns, is_valid = _sources(mode, int(lane), int(clamp))
        new_rows = rows[:, source_columns]
        return _back(new_rows, indices), _back(np.broadcast_to(is_valid, rows.shape), indices) if wants_valid else None
    reader_lanes = np.broadcast_to(np.arange(WARP), rows.shape)
    source_lanes = in_warps(c, lane)[0].astype(np.int64)
    clamp_rows = in_warps(c, clamp)[0].astype(np.int64)
    source_columns, is_valid = _source_lanes(mode, reader_lanes, source_lanes, clamp_rows)
    return _back(np.take_along_axis(rows, source_columns, axis=1), indices), _back(is_valid, indices)


def _by_mask(mask: Any, call: Callable[[np.uint32], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Calls `call` once for each different lane mask. Each lane gets the result for its own mask."""
    if isinstance(mask, np.generic):
        return call(np.uint32(mask))
    lane_masks = np.unique(mask)
    lane_results = call(lane_masks[0])
    for lane_mask in lane_masks[1:]:
        lanes = mask == lane_mask
        lane_results = tuple(
            None if new_result is None else np.where(lanes, new_result, old_result)
            for new_result, old_result in zip(call(lane_mask), lane_results, strict=True)
        )
    return lane_results


def _members(c: LaneContext, mask: np.uint32, guard: Any) -> npt.NDArray[np.bool_]:
    """Returns a bool mask `[warps, 32]` of the lanes that take part in a warp instruction."""
    mask_bits = np.uint32(mask) >> np.arange(WARP, dtype=np.uint32) & 1 == 1
    member_rows: npt.NDArray[np.bool_] = mask_bits & present(c)
    if guard is not None:
        member_rows &= in_warps(c, guard)[0]
    return member_rows


def vote(c: LaneContext, mode: str, predicate: Any, mask: Any, guard: Any) -> Any:
    """Runs `vote.sync`: combines the predicates of the lanes that take part (all, any, uniform or ballot)."""
    c.group.order_lanes(c.lanes)
    return _by_mask(mask, lambda named: (_vote(c, mode, predicate, named, guard),))[0]


def _vote(c: LaneContext, mode: str, predicate: Any, mask: np.uint32, guard: Any) -> Any:
    member_rows = _members(c, mask, guard)
    predicate_rows, lane_index = in_warps(c, predicate)
    true_lanes = predicate_rows & member_rows
    if mode == "ballot":
        return _spread(_bits(true_lanes), lane_index)
    n_true, n_voters = true_lanes.sum(axis=1), member_rows.sum(axis=1)
    vote_results = {"any": n_true > 0, "all": n_true == n_voters, "uni": (n_true == n_voters) | (n_true == 0)}[mode]
    return _spread(vote_results, lane_index)


def _bits(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    lane_bits: npt.NDArray[np.uint32] = (rows.astype(np.uint64) << _BIT_POSITIONS).sum(axis=1).astype(np.uint32)
    return lane_bits


def _spread(values: npt.NDArray[Any], places: npt.NDArray[np.intp] | None) -> Any:
    """Copies one value per warp to all lanes of the warp. Returns one scalar if all warps have the same value."""
    if (values == values[0]).all():
        return values[0]
    return _back(np.repeat(values, WARP), places)


def match(c: LaneContext, mode: str, value: Any, mask: Any) -> tuple[Any, ...]:
    """Runs `match.any.sync` (returns the lanes with the same value) or `match.all.sync` (all lanes if all agree)."""
    c.group.order_lanes(c.lanes)
    return _by_mask(mask, lambda named: _match(c, mode, value, named))


def _match(c: LaneContext, mode: str, value: Any, mask: np.uint32) -> tuple[Any, Any]:
    member_rows = _members(c, mask, None)
    value_rows, lane_index = in_warps(c, value)
    equal_lanes = (value_rows[:, :, None] == value_rows[:, None, :]) & member_rows[:, None, :]
    lane_bits = (equal_lanes.astype(np.uint64) << _BIT_POSITIONS).sum(axis=2).astype(np.uint32)
    if mode == "any":
        return _back(lane_bits, lane_index), None
    member_bits = _bits(member_rows)
    is_equal = ((lane_bits == member_bits[:, None]) | ~member_rows).all(axis=1)
    return _spread(np.where(is_equal, member_bits, np.uint32(0)), lane_index), _spread(is_equal, lane_index)


def reduce(c: LaneContext, operation: str, value: Any, mask: Any, guard: Any) -> Any:
    """Runs `redux.sync`, a reduction over the lanes that take part."""
    c.group.order_lanes(c.lanes)
    return _by_mask(mask, lambda named: (_reduce(c, operation, value, named, guard),))[0]


def _reduce(c: LaneContext, operation: str, value: Any, mask: np.uint32, guard: Any) -> Any:
    member_rows = _members(c, mask, guard)
    value_rows, lane_index = in_warps(c, value)
    dtype_limits = np.iinfo(value_rows.dtype)
    neutral_value = {"min": dtype_limits.max, "max": dtype_limits.min, **_NEUTRAL_VALUES}[operation]
    filled_rows = np.where(member_rows, value_rows, np.array(neutral_value).astype(value_rows.dtype))
    return _spread(REDUCTION_UFUNCS[operation].reduce(filled_rows, axis=1, dtype=value_rows.dtype), lane_index)


def elect(c: LaneContext, mask: Any) -> tuple[Any, ...]:
    """Runs `elect.sync`: returns the lowest lane of the mask, and a predicate that is true only for this lane."""
    return _by_mask(mask, lambda named: _elect(c, named))


def _elect(c: LaneContext, mask: np.uint32) -> tuple[Any, Any]:
    member_rows = _members(c, mask, None)
    leader_lane = member_rows.argmax(axis=1)
    is_leader = np.arange(WARP) == leader_lane[:, None]
    return _spread(leader_lane.astype(np.uint32), _places(c)), _back(is_leader, _places(c))


def active_mask(c: LaneContext) -> Any:
    """Runs `activemask`: returns the mask of the lanes that run this instruction together."""
    return _spread(_bits(present(c)), _places(c))
