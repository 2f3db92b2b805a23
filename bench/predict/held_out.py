"""The predictor's error on public kernels (`results/public_kernels.py`) against their published times.

Three models are compared: the bound times a constant; launches and the bound at sustained rates; and the whole
prediction, which reads compiled code.  Each is fitted on one part of the readings and judged on another: on shapes that
it has not seen, and on kernels that it has not seen (`python -m rooflab.bench.predict.held_out` prints the errors).
Two constants are fitted: microseconds that each launch takes beyond the prediction, as the source times it (between
events, or in a graph), and a factor on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from rooflab.kernels._files import write_whole
from rooflab.roofline.published import FOLDER

FILE = FOLDER / "predictions.csv"
Kind = Literal["memory", "attention", "product"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LAUNCHES_US = (0.0, *(0.25 * step for step in range(1, 41)))
"""The tried times of a launch beyond the predicted one."""


class PublishedTime(NamedTuple):
    """One published time of a public kernel beside its prediction; a table of readings has its fields as columns."""

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


Model = Callable[[pd.DataFrame], "pd.Series[float]"]
"""What a model says of everything except the launches of each reading, in microseconds."""
MODELS: dict[str, Model] = {
    "bound": lambda readings: readings["bound_us"],
    "launches and sustained bound": lambda readings: readings["sustained_us"],
    "compiled code": lambda readings: readings["predicted_us"] - readings["launch_us"],
}


class HeldOutFit(NamedTuple):
    """A model's two constants."""

    launch_us: float
    factor: float

    def errors(self, model: Model, readings: pd.DataFrame) -> pd.Series[float]:
        """Relative errors without sign."""
        said = readings["launches"] * self.launch_us + self.factor * model(readings)
        return (said / readings["published_us"] - 1).abs()


def fit(model: Model, readings: pd.DataFrame, launches: bool = True) -> HeldOutFit:
    """The constants with the least mean error, each error counted as 1 at most; without `launches` the factor alone."""
    times, said, tried = readings["published_us"], model(readings), []
    for us in LAUNCHES_US if launches else (0.0,):
        rests = np.maximum(times - readings["launches"] * us, 0.05 * times)
        tried.append(HeldOutFit(us, float(np.exp(np.median(np.log(rests / said))))))
    return min(tried, key=lambda own: float(own.errors(model, readings).clip(upper=1.0).mean()))


class Errors(NamedTuple):
    """Errors on readings that a fit has not seen."""

    median: float
    nine_in_ten: float

    def __str__(self) -> str:
        return f"{self.median:.0%} in the median, {self.nine_in_ten:.0%} in nine of ten"


def _told(errors: Iterable[pd.Series[float]]) -> Errors:
    return Errors(*pd.concat(errors).quantile([0.5, 0.9]))


def by_shape(model: Model, readings: pd.DataFrame, launches: bool = True) -> Errors:
    """Fitted for each kernel to every second shape, and judged on the others."""
    found = []
    for _, own in readings.groupby("kernel", sort=False):
        seen = own["shape"].isin(own["shape"].unique()[::2])
        found.append(fit(model, own[seen], launches).errors(model, own[~seen]))
    return _told(found)


def by_kernel(model: Model, readings: pd.DataFrame, launches: bool = True) -> Errors | None:
    """Fitted to the other kernels of the kind; None for a kind with one kernel."""
    own = [readings["kernel"] == kernel for kernel in readings["kernel"].unique()]
    if len(own) < 2:
        return None
    return _told(fit(model, readings[~unseen], launches).errors(model, readings[unseen]) for unseen in own)


def unfitted(readings: pd.DataFrame) -> Errors:
    """The errors of the prediction as `explain` prints it."""
    return _told([(readings["predicted_us"] / readings["published_us"] - 1).abs()])


def rows(readings: pd.DataFrame) -> list[dict[str, str]]:
    """The errors of each model on each kind, for a table."""
    found = []
    for kind in KINDS:
        own = readings[readings["kind"] == kind]
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
    write_whole(path, pd.DataFrame(readings).to_csv(index=False, float_format="%.4g"))


@cache
def read(path: Path = FILE) -> pd.DataFrame:
    """The readings of a file.  Raises `ValueError` if it is missing, or `write` has not written it."""
    if not path.is_file():
        raise ValueError(f"predictions: expected the file {path}, found none")
    found = pd.read_csv(path, dtype={"shape": str})
    wanted, columns = ", ".join(PublishedTime._fields), ", ".join(map(str, found.columns))
    if columns != wanted:
        raise ValueError(f"predictions: expected the columns {wanted} in {path}, got {columns}")
    return found


if __name__ == "__main__":
    from rooflab.bench import show

    show.table(rows(read()), ("kind", "model", "all", "unseen shapes", "unseen kernel"), "errors of predicted times")
