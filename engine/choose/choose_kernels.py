"""Chooses the kernel of each op on this machine's CPU.  Kernels are timed once, and the times are kept in a file.

Another CPU's times do not help: on one CPU the packed matmul is the fastest at one row, on another torch's own matmul.
A start of the engine spends at most `LIMIT_S` seconds on timing.  The next start measures missing times, and times from
a busy machine.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from psutil import virtual_memory

from rooflab.engine.choose.model_shapes import (
    MATMUL_OPS,
    MOST_REPLAYED,
    LargestSizes,
    model_inputs,
    packed,
    real,
    registered,
)
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder, check_writable
from rooflab.kernels._native import HEADERS, library, processor
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.kernels.registry import Kernel
from rooflab.kernels.tuning import BUCKET_ROWS, bucket_of

EAGER_OPS = ("flash_attention_varlen", "paged_attention", "sample")
"""The ops that are no part of a decode step from the embedding to the logits."""
TOLERATED_RATIO = 1.05
"""The largest allowed ratio of a product's time to the bucket's best time.  A larger ratio needs a second packing."""
TOLERATED_REPLAY_RATIO = 1.15
"""A step is replayed up to this estimated ratio to an eager step's time, because such estimates vary."""
TIMING_ROUNDS = 5
MAX_CPU_WAIT_RATIO = 0.05
"""The highest allowed ratio of the time that threads wait for a core to the time that they run, as in the bench."""
LIMIT_S = 10.0
"""The most seconds of timing at a start, without compilation.  Without a limit, 2 busy cores took 87 s and 128 s."""
PROVISIONAL = "provisional: not timed on a quiet machine"
SAMPLE_S = 5e-4
"""The shortest time of a sample, in seconds.  A sample repeats the call until this time is reached."""
COLD_WEIGHT_BYTES = 64 * 2**20
"""Bytes of all copies of a timed product's weights: more than a cache holds, as a model's weights are not cached."""

Times = dict[str, dict[str, dict[str, float]]]
"""Times in microseconds by op, bucket and kernel."""


@dataclass(frozen=True)
class Choice:
    """Holds the kernel of one op in one bucket (range of rows), and the reason for this choice."""

    op: str
    bucket: str
    kernel: Kernel
    why: str


def choose_kernels(
    able: Mapping[tuple[str, str], list[Choice]],
    rows: Mapping[tuple[str, str], int],
    limits: LargestSizes,
    replays: bool = False,
) -> dict[tuple[str, str], list[Choice]]:
    """Returns the usable kernels of each op and bucket (range of row counts), the fastest first.

    With `replays`, the engine can record a decode step once and replay it.  A recorded step contains only C++ kernels.
    If it is not clearly slower in a bucket of up to 16 rows, this bucket gets only C++ kernels."""
    arch = limits.arch
    key_data = {
        "layers": [arch.num_layers, arch.hidden_size, arch.intermediate_size, arch.vocab_size],
        "heads": [arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.window],
        "dtype": limits.codes or str(limits.dtype).removeprefix("torch."),
        "block_size": limits.block_size,
        "max_model_len": limits.max_model_len,
        # These decide which kernels can run, and at how many rows they are timed.
        "max_rows": [limits.max_rows, limits.sequences, limits.max_drawn],
    }
    # All that could serve, and not those of `able` alone: a swap of one op keeps the times, and so the others' kernels.
    all_kernels = (kernel for op in map(registered, limits.ops) for kernel in registry.kernels(op).values())
    kernels = [kernel for kernel in all_kernels if kernel.role != "peer" and kernel.backend in registry.CPU_BACKENDS]
    cache = KeptTimes(arch.name, key_data, (kernel for kernel in kernels if kernel.why_not_here(limits.device) is None))
    sorted_choices = {}
    for (op, bucket), choices in able.items():
        if len(choices) > 1:
            timer = partial(time_kernels, op, rows[op, bucket], [choice.kernel for choice in choices], limits)
            op_times = cache.of(op, bucket, timer)
            choices = [replace(choice, why=_reason(choice, op_times)) for choice in choices]
            choices.sort(key=lambda choice: op_times.get(choice.kernel.name, 0.0))
        sorted_choices[op, bucket] = choices
    cache.keep()
    if cache.provisional:
        logging.getLogger(__name__).warning("kernels of %s: %s", arch.name, PROVISIONAL)
    if replays:
        for bucket_rows in (row_limit for row_limit in BUCKET_ROWS if row_limit <= MOST_REPLAYED):
            sorted_choices |= replayed(bucket_of(bucket_rows), sorted_choices, cache.times, limits.arch.num_layers)
    for matmul_op in limits.matmul_ops:
        matmul_choices = {bucket: choices for (op, bucket), choices in sorted_choices.items() if op == matmul_op}
        layouts = _ways(matmul_choices, cache.times.get(matmul_op, {}), limits)
        for bucket, choices in matmul_choices.items():
            sorted_choices[matmul_op, bucket] = [choice for choice in choices if choice.kernel.prepare in layouts]
    return sorted_choices


def replayed(
    bucket: str, fastest: Mapping[tuple[str, str], list[Choice]], times: Times, num_layers: int
) -> dict[tuple[str, str], list[Choice]]:
    """Returns the C++ kernels for a decode step that is recorded and replayed. `bucket` is a range of row counts.

    Returns {} if a timed op has no C++ kernel, or if an eager step is clearly faster. A replayed step skips the Python
    code of each launch. The estimated time of this code is the shortest measured time of any kernel call."""
    step = {op: choices for (op, op_bucket), choices in fastest.items() if op_bucket == bucket and op not in EAGER_OPS}
    timed_ops = {op: choices for op, choices in step.items() if len(choices) > 1 and times[op].get(bucket)}
    native = {op: [choice for choice in choices if choice.kernel.backend == "cpp"] for op, choices in timed_ops.items()}
    if not all(native.values()):
        return {}
    calls = {op: {"embedding": 1, "rmsnorm": 1, "fused_add_rmsnorm": 2 * num_layers}.get(op, num_layers) for op in step}
    calls |= dict.fromkeys(MATMUL_OPS, 1)  # all products of a step are timed together

    def milliseconds(kernels: Mapping[str, list[Choice]]) -> float:
        return sum(calls[op] * times[op][bucket][kernels[op][0].kernel.name] for op in timed_ops) / 1e3

    launches = sum(calls[op] for op in step) + 4 * num_layers
    host_ms = launches * min((op_us for op in timed_ops for op_us in times[op][bucket].values()), default=0.0) / 1e3
    eager_ms, replay_ms = milliseconds(timed_ops), milliseconds(native) - host_ms
    if replay_ms > TOLERATED_REPLAY_RATIO * eager_ms:
        return {}
    why = f"; a replayed step {replay_ms:.1f} ms, an eager one {eager_ms:.1f}"
    return {
        (op, bucket): [replace(choice, why=choice.why + why * (op in MATMUL_OPS)) for choice in choices]
        for op, choices in native.items()
    }


def _ways(
    products: Mapping[str, list[Choice]], times: Mapping[str, Mapping[str, float]], limits: LargestSizes
) -> set[Any]:
    """Chooses the packed layouts of matmul weights. The engine keeps one layout, or two if needed and memory has room.

    One layout is enough if it takes at most `TOLERATED_RATIO` times the best time, at all row counts."""
    packers = list(dict.fromkeys(choice.kernel.prepare for choices in products.values() for choice in choices))
    fit = 2 * limits.arch.parameters().total * limits.dtype.itemsize < virtual_memory().available / 2
    subsets = [set(subset) for count in ((1, 2) if fit else (1,)) for subset in itertools.combinations(packers, count)]

    def losses(ways: set[Any]) -> list[float]:
        """Returns the slowdown in each bucket (range of row counts) if only the weight layouts in `ways` are used. A
        slowdown is the best time with these layouts divided by the best time with any layout."""
        time_ratios = []
        for bucket, choices in products.items():
            measured_times = times.get(bucket) or {choice.kernel.name: 1.0 for choice in choices}
            kernel_times = {choice.kernel.name: measured_times[choice.kernel.name] for choice in choices}
            subset_times = (kernel_times[choice.kernel.name] for choice in choices if choice.kernel.prepare in ways)
            time_ratios.append(min(subset_times, default=math.inf) / min(kernel_times.values()))
        return time_ratios

    fast_subsets = [ways for ways in subsets if max(losses(ways)) <= TOLERATED_RATIO]
    smallest_subsets = [ways for ways in fast_subsets if len(ways) == len(fast_subsets[0])] or subsets
    return min(smallest_subsets, key=lambda ways: math.prod(losses(ways)))


def _reason(choice: Choice, times: Mapping[str, float]) -> str:
    times_text = ", ".join(f"{name} {time_us:.0f}" for name, time_us in times.items() if name != choice.kernel.name)
    return f"{times[choice.kernel.name]:.0f} us here, against {times_text}" if times else PROVISIONAL


def time_kernels(
    op: str, rows: int, kernels: list[Kernel], limits: LargestSizes, ends: float = math.inf
) -> dict[str, float]:
    """Returns the time of each kernel in microseconds. A kernel for matmuls is timed on the matmuls of a whole step.
    Any other kernel is timed on one call. Returns {} if the clock passes `ends` before each kernel has run once."""
    inputs = [real(meta_inputs, limits.block_size) for meta_inputs in model_inputs(op, rows, limits)]
    if op not in MATMUL_OPS:
        (args,) = inputs
        calls = {kernel: {name: value for name, value in args.items() if name in kernel.accepted} for kernel in kernels}
        return time_calls({kernel.name: [partial(kernel.fn, **arguments)] for kernel, arguments in calls.items()}, ends)
    *layer_inputs, output_head = inputs
    kernel_times = time_calls({kernel.name: _products(kernel, layer_inputs) for kernel in kernels}, ends)
    heads = dict.fromkeys(kernel_times, 0.0)
    if rows <= 16:  # with more rows the head's product takes longest of all and is like the others
        heads = time_calls({kernel.name: _products(kernel, [output_head]) for kernel in kernels}, ends)
    return {name: limits.arch.num_layers * kernel_times[name] + us for name, us in heads.items() if kernel_times}


def _products(kernel: Kernel, inputs: list[dict[str, Any]]) -> list[Callable[[], None]]:
    """Returns functions that each run all matmuls of `inputs`.  For up to 16 rows, each function has its own copy of
    the weights, so that the weights do not stay in a cache."""
    weight_bytes = sum(matmul_args["b"].nbytes for matmul_args in inputs)
    copy_count = max(1, min(8, COLD_WEIGHT_BYTES // weight_bytes)) if len(inputs[0]["a"]) <= 16 else 1

    def prepared() -> list[dict[str, Any]]:
        copies = []
        for matmul_args in inputs:
            scale = {name: matmul_args[name] for name in ("scale", "minimum") if name in matmul_args}
            weight = packed(kernel.prepare, matmul_args["b"].mT.clone().mT, **scale)
            copies.append({**matmul_args, "b": weight})
        return copies

    def run(arguments: list[dict[str, Any]]) -> None:
        for matmul_args in arguments:
            kernel.fn(**matmul_args)

    return [partial(run, prepared()) for _ in range(copy_count)]


class KeptTimes:
    """Holds the times of one machine, version and model.  They come from the cache; `of` measures missing ones."""

    def __init__(self, model: str, facts: Mapping[str, Any], kernels: Iterable[Kernel]):
        self.about = {
            "processor": processor().splitlines()[0].partition(": ")[2],
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "model": model,
            **facts,
        }
        kernel_files = sorted({inspect.getfile(inspect.unwrap(kernel.fn)) for kernel in kernels})
        source_paths = (path for file in kernel_files for path in (Path(file), Path(file).with_suffix(".cpp")))
        sources = {path: path.read_text() for path in (*source_paths, *HEADERS) if path.is_file()}
        key = hashlib.sha256("\0".join([json.dumps(self.about), processor(), *sources.values()]).encode()).hexdigest()
        self._path = folder() / f"{key[:16]}.json"
        check_writable("ROOFLAB_CACHE", self._path.parent)
        cached_record = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self.times: Times = cached_record.get("times_us", {})
        self.provisional = {(op, bucket) for op, bucket in cached_record.get("provisional", ())}
        """The ops and buckets without times, or with times from a busy machine."""
        self._taken: set[tuple[str, str]] = set()
        with ThreadPoolExecutor() as compiler_pool:  # so that the compiler's time is no kernel's
            list(compiler_pool.map(library, (source_path for source_path in sources if source_path.suffix == ".cpp")))
        self._ends, self._began = time.monotonic() + LIMIT_S, run_times()

    def of(self, op: str, bucket: str, take: Callable[[float], dict[str, float]]) -> dict[str, float]:
        """Returns microseconds by kernel, from the cache or measured by `take`.  Returns {} if no time is left."""
        bucket_times = self.times.setdefault(op, {})
        if bucket in bucket_times and ((op, bucket) not in self.provisional or (self._taken and self._busy())):
            return bucket_times[bucket]
        if time.monotonic() < self._ends and (new_times := take(self._ends)):
            bucket_times[bucket] = new_times
            self._taken.add((op, bucket))
        elif bucket not in bucket_times:
            self.provisional.add((op, bucket))
        return bucket_times.get(bucket, {})

    def _busy(self) -> bool:
        return (waiting_since(self._began) or 0.0) > MAX_CPU_WAIT_RATIO

    def keep(self) -> None:
        """Writes the new times to the cache.  Times from a busy machine are marked as provisional."""
        if self._taken:
            self.provisional = self.provisional | self._taken if self._busy() else self.provisional - self._taken
            times_record = {**self.about, "provisional": sorted(self.provisional), "times_us": self.times}
            write_whole(self._path, json.dumps(times_record, indent=1, allow_nan=False) + "\n")


def folder() -> Path:
    """Returns the folder for the files of measured times."""
    return cache_folder() / "settled"


def time_calls(calls: Mapping[str, Sequence[Callable[[], Any]]], ends: float = math.inf) -> dict[str, float]:
    """Returns the median microseconds of a call for each name in `calls`. The functions of a name are called in turn.

    Returns {} if the clock passes `ends` before the first round. If it passes later, further rounds are skipped."""
    call_counts = {}
    for name, functions in calls.items():
        for function in functions:  # also the first call, which may compile
            function()
        if time.monotonic() > ends:
            return {}
        call_counts[name] = max(1, round(SAMPLE_S / max(_seconds(functions, len(functions)) / len(functions), 1e-7)))
    time_samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(TIMING_ROUNDS):
        if round_index and time.monotonic() > ends:
            break
        for name, functions in calls.items():
            call_count = -(-call_counts[name] // len(functions)) * len(functions)
            time_samples[name].append(1e6 * _seconds(functions, call_count) / call_count)
    return {name: round(statistics.median(call_times), 2) for name, call_times in time_samples.items()}


def _seconds(functions: Sequence[Callable[[], Any]], count: int) -> float:
    start_time = time.perf_counter()
    for call_index in range(count):
        functions[call_index % len(functions)]()
    return time.perf_counter() - start_time


def known() -> Iterator[dict[str, Any]]:
    """Yields the files of measured times in the cache folder as dictionaries, the newest first."""
    for path in sorted(folder().glob("*.json"), key=lambda path: -path.stat().st_mtime):
        yield json.loads(path.read_text())
