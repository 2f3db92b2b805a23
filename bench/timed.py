"""Kernels timed together: one that breaks off takes no other's time with it, and what they leave behind is judged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rooflab.bench.calls import Rotation
from rooflab.bench.environment import ClockWatch
from rooflab.bench.timing import Samples, time_functions
from rooflab.bench.trial import Failed, failure, known_errors
from rooflab.reference.spec import Inputs, OpSpec, Scheme


def time_together(
    ready: Mapping[str, Rotation], device: torch.device, budget_s: float, seed: int, gpu_uuid: str | None
) -> tuple[dict[str, Samples], dict[str, Failed], dict[str, Any] | None]:
    """Samples by kernel, the failures of those that broke off, and the clocks seen.  `budget_s` is for each kernel."""
    failures: dict[str, Failed] = {}
    if not ready:
        return {}, failures, None
    with ClockWatch(gpu_uuid) as watch:
        read = partial(time_functions, device=device, seed=seed, observe=watch.read)
        try:
            timed = read(ready, budget_s=budget_s * len(ready))
        except known_errors():
            timed = {}
            for name, function in ready.items():
                try:
                    timed |= read({name: function}, budget_s=budget_s)
                except known_errors() as error:
                    failures[name] = failure(error, "while timed")
        return timed, failures, watch.summary()


def wrong_afterwards(timed: Mapping[str, Rotation], spec: OpSpec, scheme: Scheme, fresh: Inputs) -> dict[str, str]:
    """What is wrong, by kernel, with what the timed calls left; `fresh` are untouched inputs of the case."""
    wrong: dict[str, str] = {}
    oracle = spec.oracle(fresh) if timed else ()
    for name, rotation in timed.items():
        for _, outputs in rotation.outputs():
            bad = [error for error in spec.judge(outputs, oracle, fresh, scheme) if not error.passed]
            if bad:
                wrong[name] = "; ".join(error.describe() for error in bad)
    return wrong
