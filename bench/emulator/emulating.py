"""Provides `emulating`, which runs the kernels of any Python code on the CPU, without a GPU and without registration.

from rooflab.bench.emulator import emulating

with emulating() as run:
    out = my_launcher(x, weight)
print(run.findings, run.bytes, run.launches)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rooflab.bench.compile.pretended import pretended_gpu
from rooflab.bench.emulator.launch_streams import ordered_streams
from rooflab.bench.emulator.launches import Launches, emulating_launches
from rooflab.bench.emulator.machine.run import Checks, EmulationError
from rooflab.bench.emulator.results import LaunchResult

PACKAGE_FOLDER = str(Path(__file__).parents[1])


@dataclass
class Emulation(Launches):
    """Holds the launches inside `emulating`, and the faults that were found."""

    @property
    def launches(self) -> list[LaunchResult]:
        """Returns the results of all launches.  Each has the kernel, grid, bytes by memory level, counts and races."""
        return self.results


Choice = Mapping[str, Any] | float | None
"""For an autotuned kernel, the choice of configs.  A mapping gives values of the config that runs.  A number is a time
in seconds, within which all configs run in turn.  None means the first config."""


@contextmanager
def emulating(
    *,
    races: bool = True,
    configs: Choice = None,
    memory: Iterable[torch.Tensor] = (),
    seed: int = 0,
    ctas: int | None = None,
    views: bool = False,
) -> Iterator[Emulation]:
    """Runs every launch of Triton and Gluon inside the `with` block in the emulator, as an H100 would.

    Tensors are on the CPU, but report that they are on the GPU.  An autotuned kernel runs with its first config, or
    with the configs that `configs` selects.  `races=False` skips the race detection, which is faster.  A `seed` above 0
    makes the order of warps and copies random.  `memory` lists tensors that kernels reach through pointers in memory.
    By default, all CTAs of a launch run.  With `ctas`, these run: the first CTA, the last CTA, and `ctas` random CTAs
    between them.  With `views`, an access must stay among the elements of a view: of an argument of the launch, of
    `memory`, or of a tensor whose `data_ptr()` the program asked for.  Otherwise it may use their whole storages.

    Raises `EmulationError` with the source line if a kernel reads or writes out of bounds, reads unwritten memory, or
    never ends.  Races are in `findings`.  Raises `ValueError` if no config matches `configs`."""
    checks = Checks(races=races)
    launch_emulation = Emulation(checks=checks, seed=seed, ctas=ctas, memory=tuple(memory), views=views)
    try:
        with (
            emulating_launches(launch_emulation, None if configs is None else partial(_chosen, configs)),
            pretended_gpu(views) as launch_emulation.gpu,
            ordered_streams(launch_emulation.fresh.order, launch_emulation.gpu),
            launch_emulation.fresh,
        ):
            yield launch_emulation
    except EmulationError as error:
        # Raises a new error, because contextlib gives the same error its whole traceback back.
        raise EmulationError(error.fault).with_traceback(users_part(error.__traceback__)) from None


def _chosen(configs: Mapping[str, Any] | float, candidates: list[Any], values: dict[str, Any]) -> Iterator[Any]:
    if isinstance(configs, Mapping):
        user_settings = configs.items()
        matching_configs = [config for config in candidates if user_settings <= config.all_kwargs().items()]
        if not matching_configs:
            raise ValueError(f"configs: expected one of {'; '.join(map(str, candidates))}, got {dict(configs)}")
        yield matching_configs[0]
        return
    yield candidates[0]
    end_s = time.monotonic() + configs
    for config in candidates[1:]:
        if time.monotonic() < end_s:
            yield config


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback up to the user's last frame, without the later frames of this package, Triton and torch."""
    if trace is None:
        return None
    tail = users_part(trace.tb_next)
    code_file = trace.tb_frame.f_code.co_filename
    is_library = code_file.startswith(PACKAGE_FOLDER) or "/triton/" in code_file or "/torch/" in code_file
    return tail if is_library and tail is None else TracebackType(tail, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
