"""Compares predicted times of public kernels with published measured times (`results/published/README.md`)."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import pandas as pd

from rooflab.roofline.model import Cost
from rooflab.roofline.published import TABLES_FOLDER

PREDICTIONS_FILE = TABLES_FOLDER / "predictions.csv"
Kind = Literal["memory", "attention", "product"]
UNCALIBRATED = "uncalibrated"
"""The word for a prediction without a factor that was fitted to measured times.  No prediction has such a factor."""


def kind_of(op: str, cost: Cost) -> Kind:
    """Returns the kind of an op: memory, attention or matrix product.  Prediction errors within a kind are similar."""
    if not cost.tensor_flops:
        return "memory"
    return "attention" if "attention" in op or op == "mla_decode" else "product"


class Errors(NamedTuple):
    """Holds two relative errors of predictions: the median, and the error that 90% of them do not exceed."""

    median: float
    nine_in_ten: float

    def __str__(self) -> str:
        return f"{self.median:.0%} in the median, {self.nine_in_ten:.0%} in nine of ten"


def unfitted(readings: pd.DataFrame) -> Errors:
    """Returns the relative errors of the predictions of `explain`, without a factor fitted to measured times."""
    return Errors(*(readings["predicted_us"] / readings["published_us"] - 1).abs().quantile([0.5, 0.9]))


@cache
def read() -> pd.DataFrame:
    """Reads a table with one row for each published kernel time.  Times are in microseconds.

    `timing` is `events` for CUDA events around one call, or `graph` for calls in a CUDA graph.  Predicted columns are
    `launch_us`, the launches; `sustained_us`, the bound at sustained rates; and `predicted_us`, the whole time.
    """
    return pd.read_csv(PREDICTIONS_FILE, dtype={"shape": str})


def band(kind: Kind) -> tuple[float, float]:
    """Returns the tenth and the ninetieth percentile of published over predicted time, of public kernels of a kind.

    Eight of ten published times lie between a predicted time multiplied by the first, and by the second."""
    public_rows = read().query("kind == @kind")
    ratios = sorted(public_rows["published_us"] / public_rows["predicted_us"])
    return ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]


def error_text(op: str, cost: Cost) -> str:
    """Returns a sentence with the prediction error for public kernels of the same kind as `op`."""
    kind = kind_of(op, cost)
    published_rows = read().query("kind == @kind")
    return f"{UNCALIBRATED}; public kernels of its kind ({kind}) err by {unfitted(published_rows)}"
