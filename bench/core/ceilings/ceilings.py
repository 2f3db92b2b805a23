"""The ceilings behind a bound: measured on a CPU; on a GPU measured if available, else the data sheet's."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.core.ceilings.cpu import measure_cpu
from rooflab.bench.core.ceilings.microkernels.microkernel import HERE
from rooflab.bench.core.ceilings.readings import (
    MicrokernelReading,
    assemble,
    better,
    larger,
    with_stand_ins,
    without_stand_ins,
)
from rooflab.bench.core.environment import Environment, snapshot
from rooflab.bench.core.noise import noise
from rooflab.bench.core.record import now
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder, check_writable
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.roofline.device import identify
from rooflab.roofline.model import Ceilings

CUDA_BUDGET_S = 60.0
LOG = logging.getLogger(__name__)
"""Python shows its warnings on standard error, unless a program that imports this says otherwise."""


def ceilings_for(device: torch.device) -> Ceilings | None:
    """The ceilings that bound a kernel on `device`; their `kind` says whether they were measured.

    On CUDA: the ceilings measured on this card (`rooflab ceilings`) under the present driver and limits, else the data
    sheet's, None for a GPU that is in no table.  A CPU has no unit for fp8 or tf32 products: their rate is the best
    measured rate of the other dtypes, which no product of widened operands can exceed.
    """
    if device.type == "cpu":
        return with_stand_ins(cpu_ceilings())
    kept, _ = kept_ceilings(device)
    if kept is not None and kept.ceilings is not None:
        return kept.ceilings
    known = identify(torch.cuda.get_device_name(device))
    return known.ceilings() if known else None


def limits_for(device: torch.device, ceilings: Ceilings) -> Ceilings | None:
    """The limits of any reading on `device`: on a CPU `ceilings`, on CUDA the data sheet's rates at the highest clock.

    Where the data sheet has no L2 rate, as for a Hopper, the L2 rate of `ceilings` is used.  For a GPU that is in no
    table the L2 rate is the only limit; without it the result is None, as of NOISY ceilings.  The launch floor is 0: it
    comes from `Samples`.
    """
    if device.type == "cpu":
        return None if ceilings.noise else ceilings
    known = identify(torch.cuda.get_device_name(device))
    if known is not None:
        limits = known.ceilings(known.max_clock_hz)
    elif ceilings.l2_bytes_per_s is not None:
        limits = Ceilings(ceilings.device, ceilings.kind, math.inf, {}, math.inf)
    else:
        return None
    return replace(limits, launch_floor_s=0.0, l2_bytes_per_s=limits.l2_bytes_per_s or ceilings.l2_bytes_per_s)


def kept_ceilings(device: torch.device) -> tuple[KeptCeilings | None, str]:
    """The ceilings measured on this GPU that are still valid; else None and the reason."""
    return find(_environment(device.index or 0))


@cache
def _environment(gpu_index: int) -> Environment:
    # Once per process: it calls git and NVML, and driver and clock limits do not change during a process.
    return snapshot(gpu_index)


def cuda_ceilings(
    device: torch.device,
    refresh: bool = False,
    budget_s: float = CUDA_BUDGET_S,
    advance: Callable[[str], None] = lambda limit: None,
) -> KeptCeilings:
    """The measured ceilings of this GPU, cached; measured again with `refresh` or where the environment changed.

    A measurement that yields no ceilings does not replace valid cached ones; `reason` of the result then says so.
    Raises `ValueError` where CuPy, which launches the microkernels, is not installed.
    """
    kept, _ = kept_ceilings(device)
    if kept is not None and not refresh:
        return kept
    environment = _environment(device.index or 0)
    readings = _measured(device, environment, budget_s, advance)
    found, reason = _assembled(readings, device)
    if found is None and kept is not None and kept.ceilings is not None:
        return made_now(environment, readings, None, f"{reason}; those of {kept.made} are kept")
    return keep(environment, readings, found, reason)


def _measured(
    device: torch.device, environment: Environment, budget_s: float, advance: Callable[[str], None]
) -> list[MicrokernelReading]:
    from rooflab.bench.core.ceilings.cuda import measure_cuda

    check_writable("ROOFLAB_CACHE", cache_folder())
    known = identify(torch.cuda.get_device_name(device))
    return measure_cuda(
        device,
        budget_s=budget_s,
        limits=known.ceilings(known.max_clock_hz) if known else None,
        uuid=environment.gpu.uuid if environment.gpu else None,
        advance=advance,
    )


def _assembled(readings: Sequence[MicrokernelReading], device: torch.device) -> tuple[Ceilings | None, str]:
    name = torch.cuda.get_device_name(device)
    known = identify(name)
    major, minor = torch.cuda.get_device_capability(device)
    return assemble(readings, known.name if known else name, 10 * major + minor)


def raise_cuda_ceilings(known: Ceilings, device: torch.device, budget_s: float = CUDA_BUDGET_S) -> Ceilings:
    """Measures again after a reading above the measured ceilings `known`, and keeps the better reading of each limit.

    Where the measurement yields no ceilings, `known` is returned, and a note says why.
    """
    environment = _environment(device.index or 0)
    try:
        again = _measured(device, environment, budget_s, lambda limit: None)
        _, missing = _assembled(again, device)
        kept, _ = kept_ceilings(device)
        readings = better(kept.readings if kept else (), again)
        found, _ = _assembled(readings, device)
        if found is not None:
            keep(environment, readings, found, "")
    except ValueError as error:
        found, missing = None, str(error)
    if missing:
        LOG.warning("ceilings: measuring again failed (%s); what was measured before still counts", missing)
    return found or known


def cpu_ceilings(refresh: bool = False, budget_s: float = 5.0, folder: Path | None = None) -> Ceilings:
    """The measured ceilings of this CPU with torch's present threads; read from the cache unless `refresh`.

    Bandwidth: STREAM's copy and triad (McCalpin, 1995; write-allocate not counted, as in STREAM), a plain read and a
    plain write, over arrays of at least four times the last-level cache; the best counts.  Caches get no rate, because
    a virtual machine shares its cache with its neighbours.  Matrix rates: the best `torch.mm` or packed oneDNN
    product per dtype, and of 16 bits at least that of fp32, in which they may be computed.  Vector rate: the fp32
    matrix rate, because a CPU computes fp32 products on its vector units, and no other torch call keeps them as busy.
    Special functions are not measured and set no bound.  Rates measured while other processes ran are too low (a tenth
    was seen): they have `noise`, count for this process, and are not kept.
    """
    environment = snapshot()
    path = _path(folder, environment)
    known = None if refresh else _load(path, environment) or _noisy.get((path, environment.threads))
    if known is not None:
        return known
    check_writable("ROOFLAB_CACHE", folder or cache_folder())
    began = run_times()
    measured = measure_cpu(environment.cpu, budget_s)
    measured = replace(measured, noise=noise((), waiting_since(began)))
    _save(path, environment, measured)
    return measured


_noisy: dict[tuple[Path, int], Ceilings] = {}
"""Of this process, by the file in which they are not kept and the number of threads."""


def kept_cpu_ceilings(folder: Path | None = None) -> Ceilings | None:
    """The cached ceilings of this CPU; None where they are not valid."""
    environment = snapshot()
    return _load(_path(folder, environment), environment)


def raise_cpu_ceilings(known: Ceilings, folder: Path | None = None) -> Ceilings:
    """Measures again after a reading above `known`; keeps the larger rate, so that a busy machine lowers no rate."""
    measured = without_stand_ins(known)
    raised = larger(measured, cpu_ceilings(refresh=True, folder=folder))
    environment = snapshot()
    _save(_path(folder, environment), environment, raised)
    return raised if measured == known else with_stand_ins(raised)


def _path(folder: Path | None, environment: Environment) -> Path:
    return (folder or cache_folder()) / "ceilings" / f"{environment.machine_key}.json"


def _load(path: Path, environment: Environment) -> Ceilings | None:
    """The cached ceilings, or None where they were not measured under these versions and threads."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        then = found["environment"]
        if any(then[name] != getattr(environment, name) for name in ("threads", "torch", "cpu")):
            return None
        return None if found.get("busy") else Ceilings(**found["ceilings"])  # `busy`: kept by an older version
    except (ValueError, KeyError, TypeError):
        return None  # truncated or of another version: measured again and overwritten


def _save(path: Path, environment: Environment, measured: Ceilings) -> None:
    if not measured.noise:
        found = {"environment": environment.to_dict(), "ceilings": asdict(measured)}
        write_whole(path, json.dumps(found, indent=1, allow_nan=False))
        return
    _noisy[path, environment.threads] = measured
    LOG.warning("ceilings: NOISY: %s", measured.noise)


@dataclass(frozen=True)
class KeptCeilings:
    """One card's measured ceilings, in the cache folder with the environment in which they were measured.

    Ceilings from another driver, power limit, maximum clock or version of the microkernels are not used, and the reason
    says so.  NVML cannot report a locked clock (`nvidia-smi -lgc`).  A lock during the measurement shows in the
    readings' throttle reasons (`clocks_were_set`).  A later lock is not detected here, but shows in the clocks of each
    record.
    """

    ceilings: Ceilings | None
    """None where too few limits could be measured; `reason` says which are missing."""
    reason: str
    readings: tuple[MicrokernelReading, ...]
    environment: Mapping[str, Any]
    """`Environment.to_dict()` when it was measured."""
    made: str
    """Time of the measurement, UTC, ISO 8601."""
    microkernels: str
    """`microkernels_hash()` at the measurement."""

    @property
    def clocks_were_set(self) -> bool:
        """Whether NVML reported for any reading that a user had set the clocks."""
        from rooflab.bench.core.timers.card import SET_BY_USER  # a CPU does without it

        seen = ((reading.clocks or {}).get("throttle_reasons") for reading in self.readings)
        return any((bits or 0) & SET_BY_USER for bits in seen)


def microkernels_hash() -> str:
    """A hash over the microkernels' files; when it changes, the ceilings are measured again."""
    digest = hashlib.sha256()
    for file in sorted(path for path in HERE.iterdir() if path.suffix in (".cu", ".py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def file_of(environment: Environment, folder: Path | None = None) -> Path:
    """The file of a card's ceilings.  Raises `ValueError` on an environment without a GPU."""
    if environment.gpu is None:
        raise ValueError("environment: expected one with a GPU, got none")
    card = hashlib.sha256(environment.gpu.uuid.encode()).hexdigest()[:8]
    return (folder or cache_folder()) / "ceilings" / f"{environment.machine_key}.cuda-{card}.json"


def find(environment: Environment, folder: Path | None = None) -> tuple[KeptCeilings | None, str]:
    """The cached ceilings of this card for this environment; else None and the reason."""
    if environment.gpu is None:
        return None, "there is no GPU"
    path = file_of(environment, folder)
    if not path.is_file():
        return None, "none were measured on this card"
    try:
        kept = _kept(json.loads(path.read_text()))
        then: Mapping[str, Any] = kept.environment["gpu"]
        for name, value in asdict(environment.gpu).items():
            if then[name] != value:
                return None, f"they were measured with {name} {then[name]}, and it is {value}"
    except (ValueError, KeyError, TypeError):
        return None, "what is kept is damaged or of another version"
    if kept.microkernels != microkernels_hash():
        return None, "they were measured by other microkernels"
    return kept, ""


def _kept(values: Mapping[str, Any]) -> KeptCeilings:
    found = values["ceilings"]
    readings = tuple(MicrokernelReading.from_dict(reading) for reading in values["readings"])
    return KeptCeilings(**{**values, "ceilings": None if found is None else Ceilings(**found), "readings": readings})


def made_now(
    environment: Environment, readings: Sequence[MicrokernelReading], ceilings: Ceilings | None, reason: str
) -> KeptCeilings:
    """The ceilings measured now, not written to the cache."""
    return KeptCeilings(ceilings, reason, tuple(readings), environment.to_dict(), now(), microkernels_hash())


def keep(
    environment: Environment,
    readings: Sequence[MicrokernelReading],
    ceilings: Ceilings | None,
    reason: str,
    folder: Path | None = None,
) -> KeptCeilings:
    """Caches the ceilings measured now."""
    kept = made_now(environment, readings, ceilings, reason)
    readings_json = [reading.to_dict() for reading in readings]
    ceilings_json = None if ceilings is None else asdict(ceilings)
    values = vars(kept) | {"ceilings": ceilings_json, "readings": readings_json}
    write_whole(file_of(environment, folder), json.dumps(values, indent=1, allow_nan=False))
    return kept
