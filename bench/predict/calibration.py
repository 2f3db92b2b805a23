"""Fits the predictor to measured records, one factor per kind of op, and its error on kernels that it has not seen.

The factor scales everything except the launches.  The error is held out: each kernel's records are predicted with the
factor that the other kernels of its kind give.  A kind with too few kernels stays uncalibrated; predictions then say
so, and how far public kernels of this kind are from their published times (`public.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import Record, read
from rooflab.bench.predict import public
from rooflab.bench.predict.model import Prediction
from rooflab.bench.predict.predictions import in_config, predict_all, timed_on
from rooflab.bench.predict.public import Kind
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.device import Device
from rooflab.roofline.model import Cost

UNCALIBRATED = "uncalibrated"
LEAST_KERNELS = 3
"""Least number of kernels of a kind.  With two, one other kernel's factor alone would predict a kernel."""
RESULTS = Path(__file__).resolve().parents[2] / "results"
"""The folder of the committed records in a checkout."""
_LEAST_SHARE = 0.05
"""At least this share of a measured time is no launch: a launch floor above the reading must not give a factor < 0."""


def kind_of(op: str, cost: Cost) -> Kind:
    """The kind of an op, whose kernels share one factor."""
    if not cost.tensor_flops:
        return "memory"
    return "attention" if "attention" in op or op == "mla_decode" else "product"


@dataclass(frozen=True)
class Observation:
    """One measured record beside its prediction."""

    kernel: str
    """`gemm/tensor_core`."""
    kind: Kind
    launch_s: float
    rest_s: float
    """Predicted time of everything except the launches, uncalibrated."""
    measured_s: float

    @property
    def factor(self) -> float:
        """The factor that makes the predicted rest equal to the measured one."""
        return max(self.measured_s - self.launch_s, _LEAST_SHARE * self.measured_s) / self.rest_s

    def error(self, factor: float) -> float:
        """Relative error of the prediction with `factor`, without sign."""
        return abs((self.launch_s + factor * self.rest_s) / self.measured_s - 1)


@dataclass(frozen=True)
class Fit:
    """One kind's factor, and the error on kernels that the factor was not fitted to."""

    factor: float
    error: float
    """Median over kernels of the median relative error, each kernel held out."""
    worst_error: float
    """Median relative error of the kernel with the worst prediction."""
    kernels: int
    records: int


Calibration = Mapping[str, Fit]
"""The fit of each kind; a kind without a fit is uncalibrated."""


def fit(observations: Iterable[Observation]) -> dict[str, Fit]:
    """A fit for every kind with records of enough kernels.

    Each kernel counts once, however many cases it has: the factor is the geometric median of the kernels' factors.
    """
    kinds: dict[str, dict[str, list[Observation]]] = {}
    for entry in observations:
        kinds.setdefault(entry.kind, {}).setdefault(entry.kernel, []).append(entry)
    found = {}
    for kind, kernels in sorted(kinds.items()):
        if len(kernels) < LEAST_KERNELS:
            continue
        errors = []
        for unseen, own in kernels.items():
            factor = _factor({name: seen for name, seen in kernels.items() if name != unseen})
            errors.append(median(entry.error(factor) for entry in own))
        count = sum(len(own) for own in kernels.values())
        found[kind] = Fit(_factor(kernels), median(errors), max(errors), len(kernels), count)
    return found


def _factor(kernels: Mapping[str, Sequence[Observation]]) -> float:
    return math.exp(median(median(math.log(entry.factor) for entry in own) for own in kernels.values()))


def calibrated(prediction: Prediction, kind: Kind, calibration: Calibration) -> tuple[Prediction, float | None, str]:
    """The scaled prediction, its held-out error (None where uncalibrated), and a text that gives the error."""
    known = calibration.get(kind)
    if known is None:
        beside = public.read().query("kind == @kind")
        band = f"; public kernels of its kind ({kind}) err by {public.unfitted(beside)}" if len(beside) else ""
        return prediction, None, UNCALIBRATED + band
    words = (
        f"held-out error {known.error:.0%} (worst {known.worst_error:.0%}) over {known.kernels} kernels, "
        f"{known.records} records"
    )
    return prediction.scaled(known.factor, f"factor {known.factor:.3g}; {words}"), known.error, words


def observations(records: Iterable[Record]) -> list[Observation]:
    """The measured records of Hopper GPUs among `records`, each beside the prediction for its own card.

    Leaves out records that were not measured on a GPU with a cold L2, and kernels, cases and configs that are gone.
    """
    by_device: dict[str, tuple[Device, list[tuple[KernelCase, float]]]] = {}
    for record in records:
        device, target = _device_of(record), _target_of(record)
        if device is None or target is None or record.latency_median_ms is None:
            continue
        by_device.setdefault(device.name, (device, []))[1].append((target, record.latency_median_ms * 1e-3))
    found = []
    for device, entries in by_device.values():
        answers = predict_all([target for target, _ in entries], device)
        for answer, (target, seconds) in zip(answers, entries, strict=True):
            if answer.prediction is not None:
                launch = answer.prediction.launch_s
                rest = answer.prediction.seconds - launch
                name = f"{target.op}/{target.kernel}"
                found.append(Observation(name, kind_of(target.op, answer.cost), launch, rest, seconds))
    return found


def _device_of(record: Record) -> Device | None:
    device = timed_on(record) if record.kind == "bench" else None
    return device if device and device.compute_capability == (9, 0) else None


def _target_of(record: Record) -> KernelCase | None:
    op, name, scheme = record.op, record.kernel, SCHEMES.get(record.scheme or "")
    if op not in registry.ops() or scheme is None or name not in registry.kernels(op):
        return None
    case = Case(**record.case)
    if set(case) != set(registry.get_op(op).cases["smoke"][0]):
        return None
    return in_config(KernelCase(op, name, case, scheme), record)


def load(folder: Path = RESULTS) -> Calibration:
    """The calibration from the committed GPU records; empty without such records.  The result is cached on disk."""
    files = sorted(path for path in folder.glob("**/*.jsonl") if "cpu" not in path.relative_to(folder).parts)
    records = [record for path in files for record in read(path)]
    if not any(_device_of(record) for record in records):
        return {}
    path = cache_folder() / "calibration" / f"{_key(files)}.json"
    known = _read(path)
    if known is None:
        known = fit(observations(records))
        write_whole(path, json.dumps({kind: asdict(found) for kind, found in known.items()}, allow_nan=False))
    return known


def _read(path: Path) -> dict[str, Fit] | None:
    if not path.is_file():
        return None
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_text())
        return {kind: Fit(**values) for kind, values in found.items()}
    except (ValueError, TypeError, AttributeError):
        return None  # the file is of another version or cut short: `load` fits again


def _key(files: Sequence[Path]) -> str:
    """A hash that changes with the records, the predictor and the kernels."""
    digest = hashlib.sha256()
    here = Path(__file__).resolve().parent
    sources = [*here.glob("*.py"), *(here.parents[1] / "kernels").glob("**/*.py")]
    for path in (*files, *sorted(sources)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
