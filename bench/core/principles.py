"""The principles of a check: kinds of inputs on which kernels go wrong that are right on usual ones.

A check is drawn for one (`CheckTask.principle`, from `DomainPoint.principle` or the case), and a run or a planted set
shows one if its label begins with it and a colon: `32-bit offsets: far x`, `planted values: a row of zeros`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

PRINCIPLES = ("32-bit offsets", "sizes of its file", "empty", "uneven rows", "values", "several tiles")
OFFSETS, SIZES, EMPTY, UNEVEN, VALUES, TILES = PRINCIPLES
Item = TypeVar("Item")


def shown_by(labels: Iterable[str]) -> set[str]:
    """The principles of runs."""
    begun = (label.removeprefix("planted ").partition(":")[0] for label in labels)
    return {principle for principle in begun if principle in PRINCIPLES}


def principles_first(items: Sequence[Item], principle_of: Callable[[Item], str]) -> list[Item]:
    """The first item, then the first of each principle, then the others; a limit of time leaves out the last ones."""
    places = {principle_of(item): place for place, item in reversed([*enumerate(items)])}
    early = {0, *(place for principle, place in places.items() if principle)}
    return [items[place] for place in sorted(range(len(items)), key=lambda place: (place not in early, place))]
