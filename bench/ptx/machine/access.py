"""Loads and stores of every state space, for the lanes of a context (PTX ISA 8.7, sections 5.1, 9.7.9).

Values are unsigned, as wide as one element; what they mean is the instruction's affair.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from rooflab.bench.ptx.machine.local_access import INSIDE, load_local, load_param, store_local, store_param
from rooflab.bench.ptx.machine.memory import WIDE, Allocation, BadAccess, assign
from rooflab.bench.ptx.machine.shared_access import lane_of, load_shared, store_shared

Values = tuple[Any, ...]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FAR = 0xFFFFFFF0
_WINDOWS = {SHARED_WINDOW >> 60: "shared", LOCAL_WINDOW >> 60: "local", PARAM_WINDOW >> 60: "param"}


def load(c: Context, space: str, addresses: Any, mask: Any, width: int, count: int, instruction: int) -> Values:
    """`count` values of `width` bytes for each lane that `mask` lets through (None: all); 0 for the others."""
    active = _active(mask)
    if active is not None:
        if not len(active):
            return (_UNSIGNED[width](0),) * count
        if len(active) == c.size:
            active = None
    chosen = addresses if active is None or isinstance(addresses, np.generic) else addresses[active]
    found = _LOADS[space](c, chosen, width * count, active, instruction)
    values = _unpacked(found, width, count)
    if active is None:
        return values
    return tuple(_scattered(value, active, c.size) for value in values)


def store(c: Context, space: str, addresses: Any, values: Values, mask: Any, width: int, instruction: int) -> None:
    """Stores values of `width` bytes side by side, from each lane that `mask` lets through."""
    active = _active(mask)
    if active is not None:
        if not len(active):
            return
        if len(active) == c.size:
            active = None
        else:
            addresses = addresses if isinstance(addresses, np.generic) else addresses[active]
            values = tuple(value if isinstance(value, np.generic) else value[active] for value in values)
    lanes = c.size if active is None else len(active)
    c.group.run.changes += 1
    _STORES[space](c, addresses, _packed(values, width, lanes), width * len(values), active, instruction)


def _active(mask: Any) -> npt.NDArray[np.int64] | None:
    """The lanes that a mask lets through; None for all."""
    if mask is None:
        return None
    if isinstance(mask, np.bool_):
        return None if mask else np.empty(0, np.int64)
    return np.flatnonzero(mask)


def _scattered(value: Any, active: npt.NDArray[np.int64], size: int) -> Any:
    whole = np.zeros(size, value.dtype)
    whole[active] = value
    return whole


def _unpacked(raw: Any, width: int, count: int) -> Values:
    """One value or vector for each of `count` elements."""
    if count == 1:
        return (raw,)
    kind = _UNSIGNED[width]
    if isinstance(raw, np.generic):
        return tuple(np.array([raw]).view(kind))
    return tuple(np.ascontiguousarray(raw.view(kind).reshape(-1, count).T))


def _packed(values: Values, width: int, lanes: int) -> Any:
    """The elements of each lane as one unit; a scalar where all are."""
    if len(values) == 1:
        return values[0]
    kind, unit = _UNSIGNED[width], WIDE[width * len(values)]
    if all(isinstance(value, np.generic) for value in values):
        return np.array(values, kind).view(unit)[0]
    whole = np.empty((lanes, len(values)), kind)
    for place, value in enumerate(values):
        whole[:, place] = value
    return whole.view(unit)[:, 0]


# Global memory


def _load_global(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    return load_located(c, addresses, size, active, instruction)


def load_located(
    c: Context, addresses: Any, size: int, active: Any, instruction: int, *, copy: bool = False, reduces: bool = False
) -> Any:
    """Units of `size` bytes of global memory; `copy` says that a copy reads them and not the lanes themselves,
    `reduces` that what it makes of them is stored in the same step."""
    found = _located(c, addresses, size, active, instruction)
    if found is None:
        return _each(c, addresses, size, active, instruction, copy, reduces)
    allocation, index = found
    if c.group.run.observer is not None:
        c.group.run.observer.global_read(c, active, allocation, addresses, size, instruction, copy, reduces)
    if allocation.written is not None:
        _check_written(allocation, addresses, size, instruction)
    view = allocation.view(size)
    return view[index] if isinstance(index, int) else view.take(index)


def _store_global(c: Context, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    store_located(c, addresses, value, size, active, instruction)


def store_located(
    c: Context,
    addresses: Any,
    value: Any,
    size: int,
    active: Any,
    instruction: int,
    *,
    copy: bool = False,
    reduces: bool = False,
) -> None:
    """Stores units of `size` bytes; `reduces` says that they were combined with what was there, in one step."""
    found = _located(c, addresses, size, active, instruction)
    if found is None:
        for place, address in enumerate(addresses):
            item = value if isinstance(value, np.generic) else value[place]
            lane = np.array([place if active is None else active[place]])
            store_located(c, address, item, size, lane, instruction, copy=copy, reduces=reduces)
        return
    allocation, index = found
    if allocation.read_only:
        raise Fault(f"a store to {allocation.name}, which is constant", instruction)
    if c.group.run.observer is not None:
        c.group.run.observer.global_write(c, active, allocation, addresses, size, instruction, copy, reduces)
    if allocation.written is not None:
        start = np.atleast_1d(addresses).astype(np.int64) - allocation.base
        for byte in range(size):
            allocation.written[start + byte] = True
    if c.group.run.stored is not None:
        c.group.run.stored.append((np.atleast_1d(addresses).astype(np.int64), size))
    assign(allocation.view(size), index, value)


def _located(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> tuple[Allocation, Any] | None:
    try:
        return c.group.memory.locate(addresses, size)
    except BadAccess as bad:
        raise Fault(str(bad), instruction, lane_of(c, addresses, bad.address, active)) from None


def _each(
    c: Context,
    addresses: npt.NDArray[np.uint64],
    size: int,
    active: Any,
    instruction: int,
    copy: bool,
    reduces: bool,
) -> npt.NDArray[Any]:
    """Accesses that lie in several allocations, one by one."""
    found = np.empty(len(addresses), WIDE[size])
    for place, address in enumerate(addresses):
        lane = np.array([place if active is None else active[place]])
        found[place] = load_located(c, address, size, lane, instruction, copy=copy, reduces=reduces)
    return found


def _check_written(allocation: Allocation, addresses: Any, size: int, instruction: int) -> None:
    assert allocation.written is not None
    start = np.atleast_1d(addresses).astype(np.int64) - allocation.base
    for byte in range(size):
        known = allocation.written[start + byte]
        if not known.all():
            at = int(start[~known][0]) + byte
            raise Fault(f"a read of byte {at} of {allocation.name}, which nobody has written", instruction)


def _store_const(c: Context, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    raise Fault("a store to constant memory", instruction)


# Generic addresses


def _spaces(addresses: Any) -> Any:
    return np.asarray(addresses) >> np.uint64(60)


def _inner(space: str, addresses: Any) -> Any:
    if space == "shared":
        # What is too far for 32 bits must not come back inside them.
        return np.minimum(addresses & np.uint64(INSIDE), np.uint64(_FAR)).astype(np.uint32)
    return addresses


def _load_generic(c: Context, addresses: Any, size: int, active: Any, instruction: int) -> Any:
    kinds = _spaces(addresses)
    first = int(kinds) if not kinds.ndim else int(kinds[0])
    if not kinds.ndim or (kinds == first).all():
        space = _WINDOWS.get(first, "global")
        return _LOADS[space](c, _inner(space, addresses), size, active, instruction)
    found = np.empty(len(addresses), WIDE[size])
    for kind in np.unique(kinds):
        own = np.flatnonzero(kinds == kind)
        space, lanes = _WINDOWS.get(int(kind), "global"), own if active is None else active[own]
        found[own] = _LOADS[space](c, _inner(space, addresses[own]), size, lanes, instruction)
    return found


def _store_generic(c: Context, addresses: Any, value: Any, size: int, active: Any, instruction: int) -> None:
    kinds = _spaces(addresses)
    for kind in np.unique(kinds):
        space = _WINDOWS.get(int(kind), "global")
        if not kinds.ndim or (kinds == kind).all():
            _STORES[space](c, _inner(space, addresses), value, size, active, instruction)
            return
        own = np.flatnonzero(kinds == kind)
        part = value if isinstance(value, np.generic) else value[own]
        lanes = own if active is None else active[own]
        _STORES[space](c, _inner(space, addresses[own]), part, size, lanes, instruction)


_LOADS = {
    "global": _load_global,
    "const": _load_global,
    "shared": load_shared,
    "local": load_local,
    "param": load_param,
    "generic": _load_generic,
}
_STORES = {
    "global": _store_global,
    "const": _store_const,
    "shared": store_shared,
    "local": store_local,
    "param": store_param,
    "generic": _store_generic,
}
