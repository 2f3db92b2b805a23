"""Which kernel serves an op on this machine's CPU: its candidates are timed here, once, and the times are kept.

CPUs differ too much for a record of another one: on one the packed product is the fastest at one row, on another
torch's own.  A file in the cache folder keeps the times of one machine, version and model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rooflab.engine.model_files import cache_folder
from rooflab.kernels._native import HEADERS, processor
from rooflab.kernels.registry import Kernel

ROUNDS = 5
WAITING = 0.05
"""Highest ratio of waiting for a core to running, as for a reading of the bench."""
SAMPLE_S = 5e-4
"""A sample repeats the call for at least as long."""
CONTEXT = 512
"""Keys of a sequence in the timed calls."""
COLD_BYTES = 64 * 2**20
"""Weights of the timed products, in copies: more than a cache holds, as in a model."""

Times = dict[str, dict[str, dict[str, float]]]
"""Microseconds by op, bucket and kernel."""


class Settled:
    """The times of one machine, version and model: read from the cache, or taken when they are asked for."""

    def __init__(self, model: str, facts: Mapping[str, Any], kernels: Iterable[Kernel]):
        self.about = {
            "processor": processor().splitlines()[0].partition(": ")[2],
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "model": model,
            **facts,
        }
        files = sorted({inspect.getfile(inspect.unwrap(kernel.fn)) for kernel in kernels})
        parts = (path for file in files for path in (Path(file), Path(file).with_suffix(".cpp")))
        sources = [path.read_text() for path in (*parts, *HEADERS) if path.is_file()]
        key = hashlib.sha256("\0".join([json.dumps(self.about), processor(), *sources]).encode()).hexdigest()[:16]
        self._path = folder() / f"{key}.json"
        self.times: Times = json.loads(self._path.read_text())["times_us"] if self._path.is_file() else {}
        self._new = False
        self._began = _waited()

    def of(self, op: str, bucket: str, take: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Microseconds by kernel, from the cache or from `take`."""
        buckets = self.times.setdefault(op, {})
        if bucket not in buckets:
            buckets[bucket], self._new = take(), True
        return buckets[bucket]

    def keep(self) -> None:
        """Writes what was timed since it was read; not if other processes had the cores, so that it is timed again."""
        ran, waited = (now - before for now, before in zip(_waited(), self._began, strict=True))
        if self._new and waited <= WAITING * ran:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps({**self.about, "times_us": self.times}, indent=1) + "\n")
            part.replace(self._path)


def _waited() -> tuple[int, int]:
    """Nanoseconds that this process's threads ran, and waited for a core; 0 if the system does not tell."""
    ran = waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            own = path.read_text().split()
            ran, waited = ran + int(own[0]), waited + int(own[1])
    return ran, waited


def folder() -> Path:
    """Where the times are kept."""
    return cache_folder() / "settled"


def time_calls(calls: Mapping[str, Sequence[Callable[[], Any]]]) -> dict[str, float]:
    """Median microseconds of one call by name, interleaved; the calls of a name take turns."""
    counts = {}
    for name, functions in calls.items():
        for function in functions:  # also the first call, which may compile
            function()
        counts[name] = max(1, round(SAMPLE_S / max(_seconds(functions, len(functions)) / len(functions), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, functions in calls.items():
            count = -(-counts[name] // len(functions)) * len(functions)
            samples[name].append(1e6 * _seconds(functions, count) / count)
    return {name: round(statistics.median(own), 2) for name, own in samples.items()}


def _seconds(functions: Sequence[Callable[[], Any]], count: int) -> float:
    began = time.perf_counter()
    for number in range(count):
        functions[number % len(functions)]()
    return time.perf_counter() - began


def real(inputs: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """`meta` arguments as tensors of random numbers, with valid pages and positions; the context is `CONTEXT`."""
    made: dict[str, Any] = {}
    sequences = len(inputs["seq_lens"]) if "seq_lens" in inputs else 1
    rows = len(inputs["q"]) if "q" in inputs else 1
    length = CONTEXT if sequences == rows else CONTEXT + rows
    pages = -(-max(length, rows) // block_size)
    for name, value in inputs.items():
        if name == "block_table":
            made[name] = torch.randperm(sequences * pages, dtype=torch.int32).view(sequences, pages)
        elif name == "seq_lens":
            made[name] = torch.full((sequences,), length, dtype=torch.int32)
        elif name in ("k_cache", "v_cache"):
            made[name] = torch.randn(sequences * pages, *value.shape[1:]).to(value.dtype)
        elif name == "positions":
            made[name] = torch.arange(len(value)) % len(inputs["cos"])
        elif isinstance(value, torch.Tensor) and value.is_meta:
            made[name] = _filled(name, value)
        else:
            made[name] = value
    return made


def _filled(name: str, like: torch.Tensor) -> torch.Tensor:
    if not like.is_contiguous():  # a transposed weight
        return _filled(name, like.mT).mT
    if name == "slot_mapping":
        return torch.arange(len(like))
    if name == "token_ids" or not like.dtype.is_floating_point:
        return torch.zeros(like.shape, dtype=like.dtype)
    if name in ("temperature", "top_p", "min_p"):  # greedy
        return torch.full(like.shape, float(name == "top_p"))
    return torch.randn(like.shape).to(like.dtype)


def known() -> Iterator[dict[str, Any]]:
    """The kept times, the newest first."""
    for path in sorted(folder().glob("*.json"), key=lambda path: -path.stat().st_mtime):
        yield json.loads(path.read_text())
