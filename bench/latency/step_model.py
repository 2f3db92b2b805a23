"""Models the time of an engine step from published kernel times, from bounds, or from the steps of a real run."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import ceil, inf, log2
from typing import Any

import numpy as np
from scipy.optimize import nnls

from rooflab.bench.load.trace import Trace
from rooflab.engine.scheduler import pairs_of
from rooflab.roofline.architecture import Architecture
from rooflab.roofline.device import Device
from rooflab.roofline.model import bound
from rooflab.roofline.step_times import OpTime, step_time
from rooflab.roofline.steps import ITEM_BYTES, StepKind, activation_dtype, all_reduce_s, check_arguments, link, step_ops

_GRID_POINTS = (*range(17), *(ceil(2 ** (place / 4)) for place in range(17, 81)))
"""The points of the grid: each number up to 16, then four numbers in each doubling."""
_TOKEN_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""The knots of a measured model, in tokens of a step.  Between two knots the model is a straight line."""


@dataclass(frozen=True)
class StepWork:
    """Describes the work of one step: decoding sequences, chunks of prompts and sampled tokens."""

    decodes: int
    """The number of sequences that decode, each with one token."""
    keys: int
    """The number of keys that the decoding tokens attend to, summed over all decoding tokens."""
    chunks: tuple[tuple[int, int], ...] = ()
    """For each chunk of a prompt, the position of its first token and the position after its last token."""
    drawn: int = 0
    """The number of tokens that the step draws."""

    @property
    def prompt_tokens(self) -> int:
        """Returns the number of prompt tokens in the step."""
        return sum(chunk_end - chunk_start for chunk_start, chunk_end in self.chunks)

    @property
    def pairs(self) -> int:
        """Returns the number of query-key pairs that the prompts' tokens need."""
        return sum(pairs_of(chunk_start, chunk_end) for chunk_start, chunk_end in self.chunks)


def _between(function: Callable[[int], float], x: float, most: int) -> float:
    """Interpolates `function` linearly at `x` between two grid points. Grid points above `most` become `most`."""
    if x <= 0:
        return 0.0
    index = min(bisect_left(_GRID_POINTS, x), len(_GRID_POINTS) - 1)
    points = [min(_GRID_POINTS[grid_index], most) for grid_index in (index - (_GRID_POINTS[index] > x), index)]
    return float(np.interp(x, points, [function(point) for point in points]))


_ATTN_OP_SITES = ("attention", "kv_cache_write")
"""The sites of attention.  Published times of attention contain the write of keys and values."""
_LM_HEAD_SITES = ("lm_head", "sample")
_MAX_TOKENS = 2**20
_OPS_BY_KIND = {"products": {"gemm"}, "attention": {"flash_attention", "paged_attention"}, "all-reduce": {"all_reduce"}}
"""The kinds of ops that have published times."""


@dataclass(frozen=True)
class KernelTimes:
    """Models an engine step's time as the sum of its kernels' times and the host's time.

    A kernel's time is published (`roofline/step_times.py`) or a roofline bound, interpolated linearly between sizes.

    - The output head and sampling depend on the number of sampled tokens.
    - Attention in decode depends on the number of sequences and their mean context.
    - Attention of a prompt's chunk from token `s` to token `e` takes the time of `e` tokens minus that of `s` tokens.
    - All other ops depend on the number of tokens.

    Long contexts may have no published time of attention.  Then the roofline bound is multiplied by a factor from a
    shorter context.  The factor is the published time at the shorter context, divided by the bound there.

    Raises `ValueError` on impossible dtypes or numbers of GPUs, and on a negative host time."""

    arch: Architecture
    device: Device
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    gpus: int = 1
    host_ms: float = 0.0
    """The host's milliseconds, which are added to each step."""
    bounds: bool = False
    """Whether to use the bounds of the roofline even where published times exist."""

    def __post_init__(self) -> None:
        check_arguments(self.arch, self.weight_dtype, self.kv_dtype, self.gpus)
        if not 0 <= self.host_ms < inf:
            raise ValueError(f"host_ms: expected a time from 0 ms on, got {self.host_ms:g}")

    @cached_property
    def _rest_ms(self) -> Callable[[int], float]:
        op_sites = {step_op.site for step_op in self.ops("decode", 1, 1)} - {*_ATTN_OP_SITES, *_LM_HEAD_SITES}
        return cache(lambda tokens: _sum(self.ops("decode", tokens, 1), op_sites))

    @cached_property
    def _head_ms(self) -> Callable[[int], float]:
        return cache(lambda drawn: _sum(self.ops("decode", drawn, 1), _LM_HEAD_SITES))

    @cached_property
    def _attention_ms(self) -> Callable[[StepKind, int, int], float]:
        return cache(self._attention)

    def _attention(self, kind: StepKind, batch: int, length: int) -> float:
        """Returns the time of attention in ms, for `batch` sequences of the same length."""
        bounds = replace(self, bounds=True)
        bound_ms = _sum(bounds.ops(kind, batch, length), _ATTN_OP_SITES)
        for short_length in () if self.bounds else (length, *(2**power for power in range(int(log2(length)), -1, -1))):
            ops = self.ops(kind, batch, short_length)
            if any(step_op.site in _ATTN_OP_SITES and step_op.basis != "bound" for step_op in ops):
                shorter_bound_ms = _sum(bounds.ops(kind, batch, short_length), _ATTN_OP_SITES)
                return bound_ms * _sum(ops, _ATTN_OP_SITES) / shorter_bound_ms
        return bound_ms

    @property
    def basis(self) -> str:
        """Returns a text that names the source of the times."""
        context_length = min(1024, self.arch.max_position)
        ops = (*self.ops("decode", 16, context_length), *self.ops("prefill", 1, context_length))
        published_ops = {step_op.op for step_op in ops if step_op.basis != "bound"}
        kinds = ", ".join(kind_name for kind_name, op_names in _OPS_BY_KIND.items() if published_ops & op_names)
        devices = f"of {self.gpus} x {self.device.name}"
        return f"published kernel times {devices} ({kinds}), bounds of the rest" if kinds else f"bounds {devices}"

    def ops(self, kind: StepKind, batch: int, context: int) -> Sequence[OpTime]:
        """Returns the ops of a prefill or decode step with their times.  Raises `ValueError` on an unknown dtype, a
        length below 1, or a number of GPUs that does not divide the heads."""
        step_shape = kind, batch, context, self.weight_dtype, self.kv_dtype, self.gpus
        published_time = None if self.bounds else step_time(self.arch, self.device, *step_shape)
        if published_time is not None:
            return published_time.ops
        costs, row_count = step_ops(self.arch, *step_shape), batch * context if kind == "prefill" else batch
        ceilings, reduce_calls = self.device.ceilings(), 2 * self.arch.num_layers
        op_times = [(x.op, x.site, x.calls, 1e3 * x.calls * bound(x.cost, ceilings).seconds) for x in costs]
        if self.gpus > 1:
            reduced_bytes = row_count * self.arch.hidden_size * ITEM_BYTES[activation_dtype(self.weight_dtype)]
            reduce_s = reduce_calls * all_reduce_s(reduced_bytes, self.gpus, link(self.device, self.gpus))
            op_times.append(("all_reduce", "all_reduce", reduce_calls, 1e3 * reduce_s))
        return [OpTime(*op_fields, "bound", "") for op_fields in op_times]

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds that a step takes."""

        def attention(kind: StepKind, length: float, batch: int) -> float:
            return _between(partial(self._attention_ms, kind, batch), length, self.arch.max_position)

        step_ms = self.host_ms + _between(self._rest_ms, work.decodes + work.prompt_tokens, _MAX_TOKENS)
        step_ms += _between(self._head_ms, work.drawn, _MAX_TOKENS)
        if work.decodes:
            step_ms += _between(partial(attention, "decode", work.keys / work.decodes), work.decodes, _MAX_TOKENS)
        step_ms += sum(attention("prefill", end, 1) - attention("prefill", start, 1) for start, end in work.chunks)
        return 1e-3 * step_ms


def _sum(ops: Iterable[OpTime], sites: Container[str]) -> float:
    """Adds up the ms of the ops whose position in the model is in `sites`."""
    return sum(step_op.ms for step_op in ops if step_op.site in sites)


@dataclass(frozen=True)
class MeasuredSteps:
    """Models a step's time as a linear function of its sizes, fitted to a run's steps with coefficients of at least 0.

    The sizes are tokens (piecewise linear), keys of decoding sequences, query-key pairs of prompts, and sampled tokens.
    The fit minimises the squares of relative errors (Lawson and Hanson, "Solving Least Squares Problems", 1974)."""

    coefficients: tuple[float, ...]
    gap_s: float
    """The seconds from a step's end to the start of the next step."""
    basis: str = "measured steps"

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds from a step's start to the start of the next step."""
        work_features = _features(work.decodes, work.keys, work.prompt_tokens, work.pairs, work.drawn)
        return self.gap_s + float(np.dot(self.coefficients, work_features))


StepModel = KernelTimes | MeasuredSteps


def fitted(steps: Iterable[Mapping[str, Any]]) -> MeasuredSteps:
    """Fits a model to the steps that `GET /steps` of Rooflab's server returned, as in a trace of `rooflab load`.

    Raises `ValueError` if fewer than 50 steps report how many keys they read."""
    rows = [step for step in steps if "decode_keys" in step and (step["num_decodes"] or step["prompt_tokens"])]
    if len(rows) < 50:
        raise ValueError(f"steps: expected at least 50 steps of our server with their keys, got {len(rows)}")
    step_features = np.array([_features_of(step_row) for step_row in rows])
    step_seconds = np.array([step_row["end_s"] - step_row["begin_s"] for step_row in rows])
    coefficients, _ = nnls(step_features / step_seconds[:, None], np.ones(len(rows)))
    step_gaps = [next_row["begin_s"] - step_row["end_s"] for step_row, next_row in itertools.pairwise(rows)]
    busy_gaps = [gap_s for gap_s, step_row in zip(step_gaps, rows, strict=False) if step_row["running"] and gap_s < 0.1]
    return MeasuredSteps(tuple(map(float, coefficients)), float(np.median(busy_gaps)) if busy_gaps else 0.0)


def of_trace(trace: Trace) -> tuple[MeasuredSteps, float]:
    """Returns a model of a run's step times, and the median seconds from a step's end until the client has its tokens.

    Raises `ValueError` if fewer than 50 steps report how many keys they read."""
    fitted_model = fitted(trace.steps or ())
    end_times = np.array([trace_step["end_s"] for trace_step in trace.steps or ()])
    times_s = [traced_request.chunks[0].time_s for traced_request in trace.requests if traced_request.chunks]
    delays = [time_s - end_times[index - 1] for time_s in times_s if (index := int(np.searchsorted(end_times, time_s)))]
    return fitted_model, float(np.median(delays)) if delays else 0.0


def _features_of(row: Mapping[str, Any]) -> np.ndarray:
    """Returns a server step's model features. A drafted token counts as a decoded token and as a sampled token."""
    num_decodes, drafted_tokens = row["num_decodes"], row.get("drafted", 0)
    sampled_tokens = num_decodes + drafted_tokens if drafted_tokens else row["tokens"]
    return _features(
        num_decodes + drafted_tokens, row["decode_keys"], row["prompt_tokens"], row["prompt_pairs"], sampled_tokens
    )


def _features(decodes: int, keys: int, prompt_tokens: int, pairs: int, drawn: int) -> np.ndarray:
    tokens = decodes + prompt_tokens
    # The tokens in each stretch between two knots; the fit gives each stretch a price per token.
    segment_shares = np.clip((tokens - np.array(_TOKEN_KNOTS[:-1], float)) / np.diff(_TOKEN_KNOTS), 0.0, 1.0)
    return np.array(
        [1.0, *(segment_shares * np.diff(_TOKEN_KNOTS)), max(0, tokens - _TOKEN_KNOTS[-1]), keys, pairs, drawn]
    )
