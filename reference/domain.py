"""Describes all test cases that an op may have (its domain), and draws cases that cover many pairs of values.

Most software faults need at most two settings at once (Kuhn, Wallace and Gallo, "Software Fault Interactions and
Implications for Software Testing", IEEE TSE 30(6), 2004). So cases that cover pairs of values, with sizes at tile
edges, find more faults than a long list that a person wrote.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, combinations, islice, repeat
from pathlib import Path
from typing import Generic, TypeVar

Value = bool | int | float | str
C = TypeVar("C", bound=Hashable)
"""A case, such as `spec.Case`; this file uses only the values of a case."""
CANDIDATES = 40
"""The number of cases that are drawn for each case of a cover; the drawn case with the most new pairs is taken."""


@dataclass(frozen=True)
class Sizes:
    """An axis of test cases: the sizes from `least` to `most` that are multiples of `step`."""

    least: int
    most: int
    step: int = 1
    model: str = ""
    """The columns of `model_dims.json` that hold such sizes, separated by spaces."""
    empty: bool = False
    """Whether 0 is a size too, for empty tensors; each cover begins with size 0."""

    @cached_property
    def real(self) -> list[int]:
        """Returns the sizes on this axis that real models have."""
        return [size for size in model_sizes(self.model) if self.least <= size <= self.most and size % self.step == 0]

    def draw(self, state: random.Random, sizes: Sequence[int] = ()) -> tuple[str, int]:
        """Draws a size. Returns the kind of the size and the size. The kinds are: the least size, a power of two or a
        neighbour, a prime, any size, the upper half, and a size of a real model. `sizes` are the numbers in a kernel's
        file. If this axis has such a number, half of the draws are near or above one of them.

        Sizes are uniform in their logarithm, except in the upper half."""
        usable = [number for number in sizes if self.least <= number <= self.most]
        if usable and state.randrange(2):
            number = state.choice(usable)
            size = state.choice((number - 1, number, number + 1, 2 * number, 2 * number + 1))
            return f"own {number}: {size}", self._within(size)
        if self.real and not state.randrange(6):
            return "model", state.choice(self.real)
        kind = state.choice(("least", "below", "at", "above", "prime", "any", "large"))
        power = 2 ** state.randint(1, max(1, self.most.bit_length() - 1))
        size = {
            "least": self.least,
            "below": power - self.step,
            "at": power,
            "above": power + self.step,
            "prime": power + state.randrange(power),
            "large": state.randint((self.least + self.most) // 2, self.most),
            "any": round(math.exp(state.uniform(math.log(max(self.least, 1)), math.log(self.most)))),
        }[kind]
        size = _prime(size) if kind == "prime" else size
        return kind, self._within(size)

    def _within(self, size: int) -> int:
        return min(max(size // self.step * self.step, self.least), self.most)

    def simpler(self, size: Value) -> list[Value]:
        """Returns sizes smaller than `size`, in ascending order."""
        power = 2 ** (int(size) - 1).bit_length() // 2
        sizes = {self.least, int(size) // 2, power, power + self.step, int(size) - self.step}
        return [smaller for smaller in sorted(sizes) if self.least <= smaller < int(size) and smaller % self.step == 0]


def _prime(size: int) -> int:
    """Returns the largest prime up to `size`, or 2."""
    return next((p for p in range(size, 2, -1) if all(p % d for d in range(2, math.isqrt(p) + 1))), 2)


@cache
def model_sizes(columns: str) -> tuple[int, ...]:
    """Returns the distinct sizes of real models in some columns of `model_dims.json`, in ascending order."""
    table = json.loads(Path(__file__).with_name("model_dims.json").read_text(encoding="utf-8"))
    indices = [table["columns"].index(name) for name in columns.split()]
    return tuple(sorted({row[index] for row in table["models"] for index in indices if row[index]}))


Axis = Sizes | Sequence[Value]
"""An axis of a domain: sizes, or the values of an option, the simplest first."""


CaseValues = Mapping[str, Value]
Settle = Callable[[CaseValues], C | None]
"""Turns drawn values into a case of the op, or into None if the op has no such case or the case is too large."""


@dataclass(frozen=True)
class Domain:
    """The axes of an op's test cases, and the function that makes a case from one value of each axis."""

    axes: Mapping[str, Axis]
    make: Callable[..., CaseValues | None]
    """Makes a case from one value of each axis, by name.  Returns None if these values cannot be combined."""

    def cover(self, seed: int, settle: Settle[C], count: int, sizes: Sequence[int] = ()) -> Iterator[DomainPoint[C]]:
        """Yields at most `count` random points. Each point is the candidate with the most pairs of values that are new.

        Each of the first points has size 0 on one axis. `sizes` are numbers in a kernel's source file. With `sizes` no
        point has size 0, and some drawn sizes are near these numbers."""
        state = random.Random(seed)
        met: set[frozenset[tuple[str, object]]] = set()
        yielded_cases: set[C] = set()
        bare = [{name: 0} for name, axis in self.axes.items() if isinstance(axis, Sizes) and axis.empty and not sizes]
        for fixed in islice(chain(bare, repeat(dict[str, int]())), count):
            candidates = [self._draw(state, sizes) for _ in range(CANDIDATES)]
            for values, value_pairs in sorted(candidates, key=lambda candidate: -len(candidate[1] - met)):
                point = self._point({**values, **fixed}, settle) if value_pairs - met else None
                if point is not None and point.case not in yielded_cases:
                    met |= value_pairs if not fixed else set()
                    yielded_cases.add(point.case)
                    yield replace(point, principle="sizes of its file" if sizes else "empty" if fixed else "")
                    break

    def _draw(
        self, state: random.Random, sizes: Sequence[int] = ()
    ) -> tuple[dict[str, Value], set[frozenset[tuple[str, object]]]]:
        values: dict[str, Value] = {}
        features: list[tuple[str, object]] = []
        for name, axis in self.axes.items():
            kind, values[name] = axis.draw(state, sizes) if isinstance(axis, Sizes) else (None, state.choice(axis))
            features.append((name, values[name] if kind is None else kind))
        return values, {frozenset(pair) for pair in combinations(features, 2)}

    def _point(self, values: Mapping[str, Value], settle: Settle[C]) -> DomainPoint[C] | None:
        case_values = self.make(**values)
        case = None if case_values is None else settle(case_values)
        return None if case is None else DomainPoint(case, values)

    def simpler(self, point: DomainPoint[C], settle: Settle[C]) -> Iterator[DomainPoint[C]]:
        """Yields points that differ from `point` in one value, which is simpler. The simplest value comes first."""
        for name, axis in self.axes.items():
            value = point.values[name]
            simpler = axis.simpler(value) if isinstance(axis, Sizes) else axis[: axis.index(value)]
            for less in simpler:
                candidate = self._point({**point.values, name: less}, settle)
                if candidate is not None and candidate.case != point.case:
                    yield candidate


@dataclass(frozen=True)
class DomainPoint(Generic[C]):
    """One test case of an op, and the value on each axis that made this case."""

    case: C
    values: Mapping[str, Value]
    principle: str = ""
    """The principle that drew the point, by its name in `bench/core/inputs.py`; empty for a point of the cover."""


def shrunk(
    domain: Domain, point: DomainPoint[C], settle: Settle[C], fails: Callable[[C], bool], tries: int
) -> DomainPoint[C]:
    """Returns the simplest failing point that `tries` calls of `fails` can find, starting from the failing `point`."""
    tried = {point.case}
    while True:
        for simpler in domain.simpler(point, settle):
            if simpler.case in tried:
                continue
            if not tries:
                return point
            tries -= 1
            tried.add(simpler.case)
            if fails(simpler.case):
                point = simpler
                break
        else:
            return point
