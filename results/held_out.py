"""The predictor's error on public kernels, fitted on one part of the readings and judged on another.

    python results/held_out.py

Three models are compared: the bound times a constant; launches and the bound at sustained rates; and the whole
prediction, which reads compiled code.  Each is judged on shapes that it has not seen, and on kernels that it has not
seen.  Two constants are fitted: microseconds that each launch takes beyond the prediction, as the source times it
(between events, or in a graph), and a factor on the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

from rooflab.bench import show
from rooflab.bench.predict.public import KINDS, Errors, read, unfitted

LAUNCHES_US = (0.0, *(0.25 * step for step in range(1, 41)))
"""The tried times of a launch beyond the predicted one."""


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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    show.table(rows(read()), ("kind", "model", "all", "unseen shapes", "unseen kernel"), "errors of predicted times")


if __name__ == "__main__":
    main()
