"""How a search reads the times of configs: off the device, or, in a dry run, made up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from rooflab.bench.calls.calls import Rotation, copies_of
from rooflab.bench.check.trial import failure, known_errors
from rooflab.bench.compile.static import CompileFailure, Request, compile_kernels
from rooflab.bench.timing.stopwatch import stopwatch_for
from rooflab.bench.timing.timing import time_functions
from rooflab.bench.tune.search import Seconds
from rooflab.kernels.configs import with_config
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme

QUICK_S, QUICK_SAMPLES = 0.01, 5
"""Seconds, and at least so many samples, of one config on one case."""


def config_name(config: Any) -> str:
    """A config in one line, `block_m=64,num_warps=4`."""
    return ",".join(f"{name}={value}" for name, value in asdict(config).items())


class DeviceTimes:
    """Times configs of one kernel beside each other on each of some cases, whose inputs are made once."""

    def __init__(
        self, kernel: Kernel, spec: OpSpec, cases: Sequence[Case], scheme: Scheme, device: torch.device, seed: int
    ):
        self._kernel, self._spec, self._device, self._seed = kernel, spec, device, seed
        self._cases, self._scheme = cases, scheme
        self._compiled: set[Any] = set()
        self._watch = stopwatch_for(device, True, None)
        self._inputs = [copies_of(spec, case, scheme, device, seed) for case in cases]

    def __call__(self, configs: Sequence[Any]) -> dict[Any, Seconds | str]:
        """Median seconds of each config on each case, or why it failed."""
        found: dict[Any, Seconds | str] = {**dict.fromkeys(configs, ()), **self._compile(configs)}
        for inputs in self._inputs:
            ready = {}
            for config in configs:
                if isinstance(found[config], str):
                    continue
                try:
                    rotation = Rotation(with_config(self._kernel, config), self._spec, inputs)
                    rotation()  # compiles
                    ready[config_name(config)] = rotation
                except known_errors() as error:
                    found[config] = failure(error, "").reason
            if not ready:
                break
            samples = time_functions(
                ready,
                self._device,
                budget_s=QUICK_S * len(ready),
                min_samples=QUICK_SAMPLES,
                seed=self._seed,
                stopwatch=self._watch,
            )
            for config in configs:
                before = found[config]
                if not isinstance(before, str):
                    found[config] = (*before, samples[config_name(config)].median_s)
        return found

    def _compile(self, configs: Sequence[Any]) -> dict[Any, str]:
        """Compiles what is new of a group on all cores, into Triton's cache, and says what does not compile.

        A process compiles one config after the other, a second or so each; the launch then finds them done.
        """
        new = [config for config in configs if config not in self._compiled]
        self._compiled.update(new)
        ours = self._kernel.fn.__module__.startswith("rooflab.")
        if self._device.type != "cuda" or self._kernel.backend not in ("triton", "gluon") or not ours:
            return {}
        case = self._cases[0]
        requests = [Request(self._spec.name, self._kernel.name, case, self._scheme, config=config) for config in new]
        answers = zip(new, compile_kernels(requests), strict=True)
        return {config: str(answer) for config, answer in answers if isinstance(answer, CompileFailure)}


def made_up(configs: Sequence[Any]) -> dict[Any, Seconds | str]:
    """Times that mean nothing and are the same every time, for a dry run: 0.5 to 1.5 ms by a hash of the config."""
    found: dict[Any, Seconds | str] = {}
    for config in configs:
        digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).digest()
        found[config] = (0.5e-3 + int.from_bytes(digest[:4]) / 2**32 * 1e-3,)
    return found
