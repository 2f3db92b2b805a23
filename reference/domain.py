"""Describes all test cases that an op may have, and draws test cases that cover many pairs of values.

Most software faults need only one or two settings (Kuhn, Wallace and Gallo, "Software Fault Interactions and
Implications for Software Testing", IEEE TSE 30(6), 2004). So pairs of values find more faults than a long list that a
person wrote.
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
CANDIDATE_COUNT = 40
"""The number of cases that are drawn for each case of a cover; the drawn case with the most new pairs is taken."""


@dataclass(frozen=True)
class Sizes:
    """The allowed sizes of one dimension in test cases: the multiples of `step` from `least` to `most`."""

    least: int
    most: int
    step: int = 1
    model: str = ""
    """The columns of `model_dims.json` that hold such sizes, separated by spaces."""
    empty: bool = False
    """Whether 0 is a size too, for empty tensors; each cover begins with size 0."""

    @cached_property
    def real(self) -> list[int]:
        """Returns the allowed sizes that occur in real models."""
        return [size for size in model_sizes(self.model) if self.least <= size <= self.most and size % self.step == 0]

    def draw(self, state: random.Random, sizes: Sequence[int] = ()) -> tuple[str, int]:
        """Draws a random size. Returns the rule that chose the size (such as `prime`), and the size.

        `sizes` are the integers in a kernel's source file, which may be tile sizes. About half of the draws are near
        such an integer or its double. Other draws are powers of two, primes, sizes of real models and others."""
        usable_sizes = [source_size for source_size in sizes if self.least <= source_size <= self.most]
        if usable_sizes and state.randrange(2):
            source_size = state.choice(usable_sizes)
            size = state.choice((source_size - 1, source_size, source_size + 1, 2 * source_size, 2 * source_size + 1))
            return f"own {source_size}: {size}", self._within(size)
        if self.real and not state.randrange(6):
            return "model", state.choice(self.real)
        size_kind = state.choice(("least", "below", "at", "above", "prime", "any", "large"))
        power_of_two = 2 ** state.randint(1, max(1, self.most.bit_length() - 1))
        size = {
            "least": self.least,
            "below": power_of_two - self.step,
            "at": power_of_two,
            "above": power_of_two + self.step,
            "prime": power_of_two + state.randrange(power_of_two),
            "large": state.randint((self.least + self.most) // 2, self.most),
            "any": round(math.exp(state.uniform(math.log(max(self.least, 1)), math.log(self.most)))),
        }[size_kind]
        size = _prime(size) if size_kind == "prime" else size
        return size_kind, self._within(size)

    def _within(self, size: int) -> int:
        return min(max(size // self.step * self.step, self.least), self.most)

    def simpler(self, size: Value) -> list[Value]:
        """Returns some allowed sizes smaller than `size`, in ascending order."""
        power_of_two = 2 ** (int(size) - 1).bit_length() // 2
        sizes = {self.least, int(size) // 2, power_of_two, power_of_two + self.step, int(size) - self.step}
        return [
            smaller_size
            for smaller_size in sorted(sizes)
            if self.least <= smaller_size < int(size) and smaller_size % self.step == 0
        ]


def _prime(size: int) -> int:
    """Returns the largest prime number that is not above `size`, but at least 2."""
    return next((p for p in range(size, 2, -1) if all(p % divisor for divisor in range(2, math.isqrt(p) + 1))), 2)


@cache
def model_sizes(columns: str) -> tuple[int, ...]:
    """Returns the distinct sizes of real models, in ascending order. `columns` names columns of `model_dims.json`."""
    model_table = json.loads(Path(__file__).with_name("model_dims.json").read_text(encoding="utf-8"))
    column_indices = [model_table["columns"].index(column_name) for column_name in columns.split()]
    return tuple(
        sorted(
            {model_row[column] for model_row in model_table["models"] for column in column_indices if model_row[column]}
        )
    )


Axis = Sizes | Sequence[Value]
"""An axis of a domain: sizes, or the values of an option, the simplest first."""


CaseValues = Mapping[str, Value]
CaseMaker = Callable[[CaseValues], C | None]
"""Turns drawn values into a case of the op, or into None if the op has no such case or the case is too large."""


@dataclass(frozen=True)
class Domain:
    """The axes (sizes and options) of an op's test cases. `make` builds a test case from one value of each axis."""

    axes: Mapping[str, Axis]
    make: Callable[..., CaseValues | None]
    """Makes a case from one value of each axis, by name.  Returns None if these values cannot be combined."""

    def cover(self, seed: int, settle: CaseMaker[C], count: int, sizes: Sequence[int] = ()) -> Iterator[DomainPoint[C]]:
        """Yields at most `count` test cases of an op. Together they cover many pairs of values of two axes (sizes or
        options). Each test case is the random candidate with the most new pairs.

        `sizes` are integers from a kernel's source file, and some drawn sizes are near them. Without `sizes`, the first
        test cases have empty tensors: one case for each dimension that may be 0."""
        random_state = random.Random(seed)
        covered_pairs: set[frozenset[tuple[str, object]]] = set()
        yielded_cases: set[C] = set()
        zero_sizes = [
            {name: 0} for name, axis in self.axes.items() if isinstance(axis, Sizes) and axis.empty and not sizes
        ]
        for fixed_values in islice(chain(zero_sizes, repeat(dict[str, int]())), count):
            drawn_values = [self._draw(random_state, sizes) for _ in range(CANDIDATE_COUNT)]
            for values, value_pairs in sorted(drawn_values, key=lambda candidate: -len(candidate[1] - covered_pairs)):
                example = self._point({**values, **fixed_values}, settle) if value_pairs - covered_pairs else None
                if example is not None and example.case not in yielded_cases:
                    covered_pairs |= value_pairs if not fixed_values else set()
                    yielded_cases.add(example.case)
                    yield replace(example, principle="sizes of its file" if sizes else "empty" if fixed_values else "")
                    break

    def _draw(
        self, state: random.Random, sizes: Sequence[int] = ()
    ) -> tuple[dict[str, Value], set[frozenset[tuple[str, object]]]]:
        values: dict[str, Value] = {}
        axis_values: list[tuple[str, object]] = []
        for name, axis in self.axes.items():
            size_kind, values[name] = axis.draw(state, sizes) if isinstance(axis, Sizes) else (None, state.choice(axis))
            axis_values.append((name, values[name] if size_kind is None else size_kind))
        return values, {frozenset(value_pair) for value_pair in combinations(axis_values, 2)}

    def _point(self, values: Mapping[str, Value], settle: CaseMaker[C]) -> DomainPoint[C] | None:
        case_values = self.make(**values)
        case = None if case_values is None else settle(case_values)
        return None if case is None else DomainPoint(case, values)

    def simpler(self, point: DomainPoint[C], settle: CaseMaker[C]) -> Iterator[DomainPoint[C]]:
        """Yields test cases with a simpler value than `point` on one axis. The simplest value comes first."""
        for axis_name, axis in self.axes.items():
            axis_value = point.values[axis_name]
            simpler_values = axis.simpler(axis_value) if isinstance(axis, Sizes) else axis[: axis.index(axis_value)]
            for simpler_value in simpler_values:
                candidate = self._point({**point.values, axis_name: simpler_value}, settle)
                if candidate is not None and candidate.case != point.case:
                    yield candidate


@dataclass(frozen=True)
class DomainPoint(Generic[C]):
    """One test case of an op, and the value of each axis from which the case was made."""

    case: C
    values: Mapping[str, Value]
    principle: str = ""
    """The principle that drew the point, as in `bench/core/check_data.py`; empty for a point of the cover."""


def shrunk(
    domain: Domain, point: DomainPoint[C], settle: CaseMaker[C], fails: Callable[[C], bool], tries: int
) -> DomainPoint[C]:
    """Returns a simpler test case than `point` that fails too, if one is found in `tries` calls of `fails`."""
    tried_cases = {point.case}
    while True:
        for simpler_point in domain.simpler(point, settle):
            if simpler_point.case in tried_cases:
                continue
            if not tries:
                return point
            tries -= 1
            tried_cases.add(simpler_point.case)
            if fails(simpler_point.case):
                point = simpler_point
                break
        else:
            return point
