"""How long a step of the engine takes: by times of published kernels, by bounds, or by the steps of a measured run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import ceil, inf, log2
from typing import Any, Protocol

import numpy as np
from scipy.optimize import nnls

from rooflab.bench.load.trace import Trace
from rooflab.engine.scheduler import pairs_of
from rooflab.roofline.architecture import Architecture
from rooflab.roofline.device import Device
from rooflab.roofline.model import bound
from rooflab.roofline.step_times import OpTime, step_time
from rooflab.roofline.steps import ITEM_BYTES, Kind, activation_dtype, all_reduce_s, check_arguments, link, step_ops

_POINTS = (*range(17), *(ceil(2 ** (place / 4)) for place in range(17, 81)))
"""Numbers that have a time of their own: each up to 16, and four for each doubling above; between are lines."""
_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of a step between which a measured model is a straight line."""


@dataclass(frozen=True)
class StepWork:
    """What one step computes."""

    decodes: int
    """Sequences of which one token is computed."""
    keys: int
    """Keys that those tokens attend to, together."""
    chunks: tuple[tuple[int, int], ...] = ()
    """Of each chunk of a prompt the positions of its first token and behind its last."""
    drawn: int = 0
    """Tokens that are drawn."""
    drafted: int = 0
    """Tokens of drafts that are verified, beside one token of each sequence."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts."""
        return sum(end - start for start, end in self.chunks)

    @property
    def pairs(self) -> int:
        """Queries of prompts times the keys that each attends to."""
        return sum(pairs_of(start, end) for start, end in self.chunks)


class StepModel(Protocol):
    """Seconds of a step."""

    @property
    def basis(self) -> str:
        """Whose times."""
        ...

    def seconds(self, work: StepWork) -> float:
        """The time from the step's begin to the next one's."""
        ...


def _line(function: Callable[[int], float], most: int) -> Callable[[float], float]:
    """A function of whole numbers, called at few of them: straight lines between, values kept."""
    known = cache(function)

    def at(x: float) -> float:
        if x <= 0:
            return 0.0
        low, high = _neighbours(x, most)
        first = known(low)
        return first if low == high else first + (known(high) - first) * (x - low) / (high - low)

    return at


def _neighbours(x: float, most: int) -> tuple[int, int]:
    above = min(bisect_left(_POINTS, x), len(_POINTS) - 1)
    below = above if _POINTS[above] <= x else above - 1
    return min(_POINTS[below], most), min(_POINTS[above], most)


_ATTENTION = ("attention", "kv_cache_write")
"""One group, because published attention has the write of keys and values in it."""
_HEAD = ("lm_head", "sample")
_MOST = 2**20
_PUBLISHED = {"products": {"gemm"}, "attention": {"flash_attention", "paged_attention"}, "all-reduce": {"all_reduce"}}
"""Kinds of ops that have published times."""


@dataclass(frozen=True)
class KernelTimes:
    """Sums of published times of kernels (`roofline/step_times.py`), or of bounds, and the host's time beside them.

    The output head and the draw go by the drawn tokens; attention of decoding sequences by their number and their mean
    context; that of a chunk is the difference of two whole prompts; all else goes by the step's tokens.  Between the
    points of a grid are straight lines.  Beyond the longest context that was published, attention takes its bound times
    what it took there over its bound; a bare bound would be shorter than what was published for less.

    Raises `ValueError` on dtypes or a number of GPUs that the model cannot have, and on a host time that is no time.
    """

    arch: Architecture
    device: Device
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    gpus: int = 1
    host_ms: float = 0.0
    """Added to each step."""
    bounds: bool = False
    """True: the bounds of the roofline are used also where published times exist."""

    def __post_init__(self) -> None:
        check_arguments(self.arch, self.weight_dtype, self.kv_dtype, self.gpus)
        if not 0 <= self.host_ms < inf:
            raise ValueError(f"host_ms: expected a time from 0 ms on, got {self.host_ms:g}")

    @cached_property
    def _bare(self) -> KernelTimes:
        return replace(self, bounds=True)

    @cached_property
    def _rest(self) -> Callable[[float], float]:
        return _line(lambda tokens: self._sum(self.ops("decode", tokens, 1), (*_ATTENTION, *_HEAD), False), _MOST)

    @cached_property
    def _head(self) -> Callable[[float], float]:
        return _line(lambda drawn: self._sum(self.ops("decode", drawn, 1), _HEAD, True), _MOST)

    @cached_property
    def _attention_of(self) -> Callable[[Kind, int], Callable[[float], float]]:
        return cache(lambda kind, batch: _line(self._attention(kind, batch), self.arch.max_position))

    def _attention(self, kind: Kind, batch: int) -> Callable[[int], float]:
        """Milliseconds of attention by the length of a sequence."""
        times, bounds = (partial(model.ops, kind, batch) for model in (self, self._bare))

        def known(length: int) -> bool:
            return any(one.site in _ATTENTION and one.basis != "bound" for one in times(length))

        def ms(length: int) -> float:
            found = self._sum(times(length), _ATTENTION, True)
            if self.bounds or known(length):
                return found
            last = 2 ** int(log2(length))
            while last and not known(last):
                last //= 2
            if not last:
                return found
            return found * self._sum(times(last), _ATTENTION, True) / self._sum(bounds(last), _ATTENTION, True)

        return ms

    @property
    def basis(self) -> str:
        """Whose times."""
        length = min(1024, self.arch.max_position)
        known = {
            one.op for one in (*self.ops("decode", 16, length), *self.ops("prefill", 1, length)) if one.basis != "bound"
        }
        parts = [name for name, ops in _PUBLISHED.items() if known & ops]
        where = f"of {self.gpus} x {self.device.name}"
        return (
            f"published kernel times {where} ({', '.join(parts)}), bounds of the rest" if parts else f"bounds {where}"
        )

    def ops(self, kind: Kind, batch: int, context: int) -> Sequence[OpTime]:
        """The ops of a step as `steps.step_ops` has it.  Raises `ValueError` as it does."""
        shape = kind, batch, context, self.weight_dtype, self.kv_dtype, self.gpus
        published = None if self.bounds else step_time(self.arch, self.device, *shape)
        if published is not None:
            return published.ops
        costs, rows = step_ops(self.arch, *shape), batch * context if kind == "prefill" else batch
        ceilings, calls = self.device.ceilings(), 2 * self.arch.num_layers
        times = [(x.op, x.site, x.calls, 1e3 * x.calls * bound(x.cost, ceilings).seconds) for x in costs]
        if self.gpus > 1:
            size = rows * self.arch.hidden_size * ITEM_BYTES[activation_dtype(self.weight_dtype)]
            reduce_s = calls * all_reduce_s(size, self.gpus, link(self.device, self.gpus))
            times.append(("all_reduce", "all_reduce", calls, 1e3 * reduce_s))
        return [OpTime(*one, "bound", "") for one in times]

    def _sum(self, ops: Iterable[OpTime], sites: Sequence[str], inside: bool) -> float:
        return sum(one.ms for one in ops if (one.site in sites) == inside)

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step."""
        ms = self.host_ms + self._rest(work.decodes + work.drafted + work.prompt_tokens) + self._head(work.drawn)
        if work.decodes:
            low, high = _neighbours(work.decodes, _MOST)
            context = work.keys / work.decodes
            few = self._attention_of("decode", low)(context)
            share = (work.decodes - low) / (high - low) if high > low else 0.0
            ms += few + (share * (self._attention_of("decode", high)(context) - few) if share else 0.0)
        attention = self._attention_of("prefill", 1)
        return 1e-3 * (ms + sum(attention(end) - attention(start) for start, end in work.chunks))


@dataclass(frozen=True)
class MeasuredSteps:
    """A sum of non-negative terms, fitted to the steps of a run: of a step's tokens (straight lines between knots), of
    the keys that decoding tokens attend to, of the query-key pairs of prompts, and of the drawn tokens.

    Least squares of relative errors (Lawson and Hanson, "Solving Least Squares Problems", 1974).
    """

    coefficients: tuple[float, ...]
    error: float
    """Median relative error over the steps of the fit."""
    gap_s: float
    """From a step's end to the next one's begin."""
    basis: str = "measured steps"

    def seconds(self, work: StepWork) -> float:
        """Seconds from a step's begin to the next one's."""
        told = work.decodes + work.drafted, work.keys, work.prompt_tokens, work.pairs, work.drawn
        return self.gap_s + float(np.dot(self.coefficients, _features(*told)))


def fitted(steps: Iterable[Mapping[str, Any]]) -> MeasuredSteps:
    """The model of the steps that `GET /steps` of our server gives, as a trace of `rooflab load` has them.

    Raises `ValueError` on fewer than 50, or on those of a server that does not tell the keys.
    """
    rows = [step for step in steps if step["num_decodes"] or step["prompt_tokens"]]
    if len(rows) < 50 or "decode_keys" not in rows[0]:
        also = "" if not rows or "decode_keys" in rows[0] else " that do not tell how many keys they read"
        raise ValueError(f"steps: expected at least 50 steps of our server with their keys, got {len(rows)}{also}")
    features = np.array([_features(*_told(row)) for row in rows])
    seconds = np.array([row["end_s"] - row["begin_s"] for row in rows])
    coefficients, _ = nnls(features / seconds[:, None], np.ones(len(rows)))
    gaps = [after["begin_s"] - row["end_s"] for row, after in zip(rows, rows[1:], strict=False)]
    busy = [gap for gap, row in zip(gaps, rows, strict=False) if row["running"] and gap < 0.1]
    error = float(np.median(np.abs(features @ coefficients / seconds - 1)))
    return MeasuredSteps(tuple(map(float, coefficients)), error, float(np.median(busy)) if busy else 0.0)


def of_trace(trace: Trace) -> tuple[MeasuredSteps, float]:
    """The model of a measured run's steps, and the seconds from a step's end until its tokens are at the client.

    Raises `ValueError` as `fitted` does.
    """
    model = fitted(trace.steps or ())
    ends = np.array([step["end_s"] for step in trace.steps or ()])
    firsts = [request.chunks[0].time_s for request in trace.requests if request.chunks]
    behind = [first - ends[place - 1] for first in firsts if (place := int(np.searchsorted(ends, first)))]
    return model, float(np.median(behind)) if behind else 0.0


def _told(row: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Decoding tokens, their keys, tokens and pairs of prompts, and drawn tokens of a step; drafts decode and draw."""
    drafted = row.get("drafted", 0)
    drawn = row["num_decodes"] + drafted if drafted else row["tokens"]
    return row["num_decodes"] + drafted, row["decode_keys"], row["prompt_tokens"], row["prompt_pairs"], drawn


def _features(decodes: int, keys: int, prompt_tokens: int, pairs: int, drawn: int) -> np.ndarray:
    tokens = decodes + prompt_tokens
    # How far between each two knots the number is; the fit gives each stretch a price per token.
    hats = np.clip((tokens - np.array(_KNOTS[:-1], float)) / np.diff(_KNOTS), 0.0, 1.0)
    return np.array([1.0, *(hats * np.diff(_KNOTS)), max(0, tokens - _KNOTS[-1]), keys, pairs, drawn])
