"""The predictor's error on public kernels (`results/public_kernels.py`) against their published times.

Three models are compared: the bound times a constant; launches and the bound at sustained rates; and the whole
prediction, which reads compiled code.  Each is fitted on one part of the readings and judged on another: on shapes that
it has not seen, and on kernels that it has not seen (`python -m rooflab.bench.predict.held_out` prints the errors).
Two constants are fitted: microseconds that each launch takes beyond the prediction, as the source times it (between
events, or in a graph), and a factor on the rest.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Literal, get_args

from rooflab.kernels._files import write_whole
from rooflab.roofline.published import FOLDER

FILE = FOLDER / "predictions.csv"
Kind = Literal["memory", "attention", "product"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LAUNCHES_US = (0.0, *(0.25 * step for step in range(1, 41)))
"""The tried times of a launch beyond the predicted one."""


@dataclass(frozen=True)
class PublishedTime:
    """One published time of a public kernel beside its prediction."""

    kernel: str
    kind: Kind
    gpu: str
    shape: str
    timing: str
    """`events` around one call, or calls in a CUDA `graph`."""
    published_us: float
    bound_us: float
    launches: int
    launch_us: float
    """The predicted launches."""
    sustained_us: float
    """The bound at sustained rates."""
    predicted_us: float
    """The whole prediction, with the launches."""


Model = Callable[[PublishedTime], float]
"""What a model says of everything except the launches, in microseconds."""
MODELS: dict[str, Model] = {
    "bound": lambda reading: reading.bound_us,
    "launches and sustained bound": lambda reading: reading.sustained_us,
    "compiled code": lambda reading: reading.predicted_us - reading.launch_us,
}


@dataclass(frozen=True)
class HeldOutFit:
    """A model's two constants."""

    launch_us: float
    factor: float

    def error(self, model: Model, reading: PublishedTime) -> float:
        """Relative error without sign."""
        said = reading.launches * self.launch_us + self.factor * model(reading)
        return abs(said / reading.published_us - 1)


def fit(model: Model, readings: Sequence[PublishedTime], launches: bool = True) -> HeldOutFit:
    """The constants with the least mean error, each error counted as 1 at most; without `launches` the factor alone."""

    def factor(launch_us: float) -> float:
        rests = [
            max(entry.published_us - entry.launches * launch_us, 0.05 * entry.published_us) / model(entry)
            for entry in readings
        ]
        return math.exp(median(math.log(rest) for rest in rests))

    tried = [HeldOutFit(us, factor(us)) for us in (LAUNCHES_US if launches else (0.0,))]
    return min(tried, key=lambda own: fmean(min(own.error(model, entry), 1.0) for entry in readings))


@dataclass(frozen=True)
class Errors:
    """Errors on readings that a fit has not seen."""

    median: float
    nine_in_ten: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.0%} in the median, {self.nine_in_ten:.0%} in nine of ten"


def errors(values: Sequence[float]) -> Errors:
    """Their median and ninth decile."""
    return Errors(median(values), quantiles(values, n=10, method="inclusive")[-1], len(values))


def by_shape(model: Model, readings: Sequence[PublishedTime], launches: bool = True) -> Errors:
    """Fitted for each kernel to every second shape, and judged on the others."""
    found = []
    for kernel in dict.fromkeys(entry.kernel for entry in readings):
        own = [entry for entry in readings if entry.kernel == kernel]
        shapes = list(dict.fromkeys(entry.shape for entry in own))
        seen = set(shapes[::2])
        known = fit(model, [entry for entry in own if entry.shape in seen], launches)
        found += [known.error(model, entry) for entry in own if entry.shape not in seen]
    return errors(found)


def by_kernel(model: Model, readings: Sequence[PublishedTime], launches: bool = True) -> Errors | None:
    """Fitted to the other kernels of the kind; None for a kind with one kernel."""
    kernels = list(dict.fromkeys(entry.kernel for entry in readings))
    if len(kernels) < 2:
        return None
    found = []
    for kernel in kernels:
        known = fit(model, [entry for entry in readings if entry.kernel != kernel], launches)
        found += [known.error(model, entry) for entry in readings if entry.kernel == kernel]
    return errors(found)


def unfitted(readings: Iterable[PublishedTime]) -> Errors:
    """The errors of the prediction as `explain` prints it."""
    return errors([abs(entry.predicted_us / entry.published_us - 1) for entry in readings])


def rows(readings: Sequence[PublishedTime]) -> list[dict[str, str]]:
    """The errors of each model on each kind, for a table."""
    found = []
    for kind in KINDS:
        own = [entry for entry in readings if entry.kind == kind]
        found.append({"kind": kind, "model": "compiled code, nothing fitted", "all": str(unfitted(own))})
        for name, model in MODELS.items():
            constants = name != "bound"
            found.append(
                {
                    "kind": kind,
                    "model": f"{name}, {'launches and a factor' if constants else 'one factor'} fitted",
                    "unseen shapes": str(by_shape(model, own, constants)),
                    "unseen kernel": str(by_kernel(model, own, constants) or "one kernel only"),
                }
            )
    return found


def write(readings: Iterable[PublishedTime], path: Path) -> None:
    """Writes readings as a table of comma-separated values."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([column.name for column in fields(PublishedTime)])
    for entry in readings:
        table.writerow([f"{value:.4g}" if isinstance(value, float) else value for value in astuple(entry)])
    write_whole(path, text.getvalue())


@cache
def read(path: Path = FILE) -> tuple[PublishedTime, ...]:
    """The readings of a file.  Raises `ValueError` if it is missing, or `write` has not written it."""
    if not path.is_file():
        raise ValueError(f"predictions: expected the file {path}, found none")
    names = [column.name for column in fields(PublishedTime)]
    with path.open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    if columns != names:
        raise ValueError(f"predictions: expected the columns {', '.join(names)} in {path}, got {', '.join(columns)}")
    return tuple(
        PublishedTime(kernel, kind, gpu, shape, timing, float(us), float(bound), int(launches), *map(float, rest))  # type: ignore[arg-type]
        for kernel, kind, gpu, shape, timing, us, bound, launches, *rest in rows
    )


if __name__ == "__main__":
    from rooflab.bench import show

    show.table(rows(read()), ("kind", "model", "all", "unseen shapes", "unseen kernel"), "errors of predicted times")
