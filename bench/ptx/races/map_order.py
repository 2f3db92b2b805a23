"""Tensor maps that a kernel makes itself: TMA reads them through a proxy of their own.

PTX ISA 8.7, section "membar/fence": between the writing of a map in global memory and its use stands a
fence.proxy.tensormap with .acquire of its address, executed by whoever uses it or by one that it has met since.
"""

from __future__ import annotations

from rooflab.bench.ptx.races.vector_clocks import GENERIC, VectorClocks


class MapOrder:
    """Which maps were written where in the order of the warps, and fenced; `clocks` are those of the CTAs at hand."""

    def __init__(self, clocks: VectorClocks) -> None:
        self._clocks = clocks
        self._writes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._fences: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def write(self, slot: int, warp: int, address: int, instruction: int) -> None:
        """`warp` of the CTA in `slot` writes the map at a global address."""
        self._writes[slot, address] = warp, self._now(slot, warp), instruction
        self._fences[slot, address] = []

    def fence(self, slot: int, warp: int, address: int) -> None:
        """fence.proxy.tensormap with .acquire; nothing where the writing is not ordered before it."""
        found = self._writes.get((slot, address))
        if found is not None and self._knows(slot, warp, found[0], found[1]):
            self._fences[slot, address].append((warp, self._now(slot, warp)))

    def use(self, slot: int, warp: int, address: int) -> int | None:
        """The instruction that wrote the map which `warp` gives to TMA, if no fence stands between; else None."""
        found = self._writes.get((slot, address))
        if found is None or any(self._knows(slot, warp, *fence) for fence in self._fences[slot, address]):
            return None
        return found[2]

    def _now(self, slot: int, warp: int) -> int:
        return int(self._clocks.current[slot, warp])

    def _knows(self, slot: int, warp: int, other: int, stamp: int) -> bool:
        return stamp < int(self._clocks.known[GENERIC, slot, warp, other])
