"""Defines the maths that all attention ops share: visible keys, scores, softmax and tolerance.

T is the number of queries, S is the number of keys, and D is the head size. A score is `q . k * scale`. A soft cap
(Gemma 2, arXiv 2408.00118) changes a score to `cap * tanh(score / cap)`. With `causal`, query i sees the keys `j <= i +
S - T`. With a `window` (Mistral 7B, arXiv 2310.06825), a query sees only the newest `window` of these keys. A sink
(gpt-oss, arXiv 2508.10925) is one extra score per head without a value. It adds exp(sink) to the softmax's denominator.
The log-sum-exp is the natural logarithm of this denominator. A query that sees no key has the output 0. Its log-sum-exp
is the sink, or -inf without a sink.

The tolerance of an output element `ref` is:

    (u_P + expm1(2 * delta) + c * u_acc * (sqrt(S) + 1)) * (P @ |V|)  +  (eta / Z + 2**-126) * sum_j |V_j|
        +  u_out * |ref|  +  eta_out
    delta = c * u_acc * (sqrt(D) * scale * max_j (|Q| |K|^T) + 2 soft cap + |sink|)

P holds the exact softmax weights. c is 4. u_acc = 2**-24 is the unit roundoff of fp32 sums. u_P and u_out are the unit
roundoffs of two dtypes: of P in `P @ V`, and of the output. eta and eta_out are half the smallest subnormal of these
dtypes. Z is the denominator divided by the exponential of the row's largest score.

delta is the error of a score. A sum of D terms has an error of about u_acc * sqrt(D) times the sum of their magnitudes.
The tanh of a soft cap adds a few u_acc times the cap. Conversion to base 2 rounds a sink once more. delta changes
exp(s) and the denominator by a factor of at most e^delta each. This gives expm1(2 * delta).

Rounding P costs u_P of each term, and an underflow of P costs eta / Z. A weight below 2**-126 may become 0 in fp32. A
subnormal output costs eta_out. Errors of random sign add up as a random walk, which gives sqrt(D) and sqrt(S). c = 4
allows an unlucky walk. The error of the log-sum-exp is delta plus the error of the denominator's sum.

Hopper's accumulator for fp8 products has 14 bits (`gemm_fp8`). For fp8, u_acc is 2**-13 in `Q K^T` and `P @ V`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rooflab.reference.contract import Argument, CallArguments, Dims
from rooflab.reference.domain import Axis, Sizes
from rooflab.reference.spec import DTYPE_NAMES, FP32_ROUNDOFF, Case, Inputs, Scheme
from rooflab.roofline.model import Cost

WALK = 4.0
"""The constant c of the tolerance: the random walk of rounding errors may reach this number of standard deviations."""
FP8_SUM_ROUNDOFF = 2.0**-13
"""The u_acc of products in fp8: the accumulator keeps 13 bits behind the leading bit and does not round."""
MIN_NORMAL = 2.0**-126
"""The least normal fp32 number: smaller results may become 0."""
MAX_SCORES_BY_DEVICE = {"cuda": 2**26}
"""The number of scores that are held at once, by device."""
DEFAULT_MAX_SCORES = 2**18
"""The number of scores held at once on other devices.  128 queries of a head with 2048 keys stay in a CPU's caches;
with 2048 queries the same work takes 2.5 times as long."""
MIN_BLOCK_ROWS = 64
"""The least number of queries in a piece.  A piece has all heads if the scores of so many queries can be held."""
TILE_EDGES = (0, 15, 16, 31, 32, 63, 64, 127, 128)
"""Positions at which pages and tiles of the usual sizes begin and end."""


HEAD_AXES: Mapping[str, Axis] = {
    **{"H_kv": Sizes(1, 16, model="kv_heads"), "group": Sizes(1, 130, model="group")},
    "D": (64, 128, 80, 96, 192, 256, 72, 112),
}
"""The axes of a domain: the number of KV heads, of query heads for each KV head, and of values in a head."""
OPTION_AXES: Mapping[str, Axis] = {
    **{"window": Sizes(0, 600), "softcap": (0.0, 20.0), "sinks": (False, True), "lse": (False, True)}
}


def with_heads(H_kv: int, group: int, equal: bool = False, **values: Any) -> Case | None:
    """Makes a test case, with S = T if `equal`. Returns None if a `window` is not causal. H is group * H_kv."""
    if values.get("window") and not values.get("causal", True):
        return None
    return Case(H=group * H_kv, H_kv=H_kv, **values | ({"S": values["T"]} if equal else {}))


@dataclass(frozen=True)
class Scores:
    """Holds the softmax scale and the soft cap, which turn a dot product q . k into an attention score."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class KeyRange:
    """The range of keys that each query i sees: `first[i]` to `end[i] - 1`. Both are (T,) int64 on the CPU."""

    first: torch.Tensor
    end: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """Returns the number of keys that each query sees, (T,)."""
        return self.end - self.first

    def hide(self, x: torch.Tensor, rows: slice, keys: slice, value: float) -> torch.Tensor:
        """Writes `value` in place into `x` (..., rows, keys), at each key that the row's query does not see."""
        first_keys, end_keys = self.first[rows], self.end[rows]
        # All queries see the keys in front of the first end, if no window begins among them.
        mask_start = int(end_keys.min()) if int(first_keys.max()) <= keys.start else keys.start
        if mask_start < keys.stop:
            key_ids = torch.arange(mask_start, keys.stop, device=x.device)
            unseen_mask = (key_ids < first_keys.to(x.device)[:, None]) | (key_ids >= end_keys.to(x.device)[:, None])
            x[..., mask_start - keys.start :].masked_fill_(unseen_mask, value)
        return x


def seen_keys(T: int, S: int, causal: bool, window: int | None = None) -> KeyRange:
    """Returns the range of keys that each query sees. Raises `ValueError` if `window` is below 1, or if a `window` is
    given without `causal`."""
    _check_window(window, causal)
    end_keys = (torch.arange(T) + S - T + 1).clamp(0, S) if causal else torch.full((T,), S)
    first_keys = torch.zeros_like(end_keys) if window is None else (torch.arange(T) + S - T + 1 - window).clamp(0, S)
    return KeyRange(first_keys.minimum(end_keys), end_keys)


def option_rules(arguments: CallArguments, dims: Dims, keys: str) -> None:
    """Raises `ValueError` on options that do not fit. The number of KV heads must divide the number of query heads. A
    window must be causal and at least 1. A soft cap must be positive. `keys` names the key argument in messages."""
    if dims["H_kv"] == 0 or dims["H"] % dims["H_kv"]:
        raise ValueError(f"{keys}: expected a number of heads that divides q's {dims['H']}, got {dims['H_kv']}")
    _check_window(arguments.get("window"), arguments.get("causal", True))
    softcap = arguments.get("softcap")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected more than 0, got {softcap}")


SINKS_ARGUMENT = Argument("H", (torch.float32,), layout="any", optional=True)


def _check_window(window: int | None, causal: bool) -> None:
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window: expected at least 1, and causal=True, got {window} and causal={causal}")


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """Returns `softmax_scale`, or D**-0.5 if `softmax_scale` is None. D is the head size of q."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale


class Piece(NamedTuple):
    """A block of the score matrix, small enough for memory: some heads, some queries, all keys that the queries see."""

    heads: slice
    rows: slice
    keys: slice


def _pieces(q: torch.Tensor, k: torch.Tensor, seen: KeyRange) -> Iterator[Piece]:
    """Yields the blocks into which the score matrix of one sequence is cut. A block is larger on a GPU, to keep the GPU
    busy."""
    (T, H, _), (S, H_kv, _) = q.shape, k.shape
    max_scores = MAX_SCORES_BY_DEVICE.get(q.device.type, DEFAULT_MAX_SCORES)
    heads = H_kv if H * S * min(T, MIN_BLOCK_ROWS) <= max_scores else 1
    row_count = max(1, max_scores // max(1, heads * (H // max(1, H_kv)) * S))
    for first_row in range(0, T, row_count):
        query_range = slice(first_row, min(first_row + row_count, T))
        first_key, end_key = int(seen.first[query_range].min()), int(seen.end[query_range].max())
        for head in range(0, H_kv, heads):
            yield Piece(slice(head, min(head + heads, H_kv)), query_range, slice(first_key, max(first_key, end_key)))


def _rows(x: torch.Tensor, piece: Piece, H_kv: int) -> torch.Tensor:
    """Returns the queries of one block of the score matrix in fp64: (KV heads, group * queries, D). `x` (T, H, D) holds
    all queries."""
    T, H, D = x.shape
    queries = x.reshape(T, H_kv, H // H_kv, D)[piece.rows, piece.heads]
    return queries.permute(1, 2, 0, 3).double().flatten(1, 2)


def _columns(x: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the keys or values of one block of the score matrix in fp64: (KV heads, keys, D). `x` (S, H_kv, D) holds
    all of them."""
    return x[piece.keys, piece.heads].transpose(0, 1).double()


def _spread(out: torch.Tensor, piece: Piece, values: torch.Tensor, H_kv: int) -> None:
    """Writes the results of one block of the score matrix to `out` (T, H, ...). `values` (KV heads, group, queries,
    ...) holds these results."""
    T, H = out.shape[:2]
    grouped_out = out.view(T, H_kv, H // H_kv, *out.shape[2:])
    grouped_out[piece.rows, piece.heads] = values.movedim(2, 0)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: KeyRange, scores: Scores, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the attention of one sequence in fp64, and returns the output and the log-sum-exp.

    q: (T, H, D); k: (S, H_kv, D); v: (S, H_kv, Dv); sinks: (H,); returns (T, H, Dv) and (T, H)."""
    (T, H, _), H_kv = q.shape, k.shape[1]
    out = torch.zeros(T, H, v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((T, H), -math.inf, dtype=torch.float64, device=q.device)
    for tile in _pieces(q, k, seen):
        logits = _scores(q, k, seen, scores, tile)
        values, _, denominator = _averaged(logits, _of(sinks, tile, H_kv), _columns(v, tile))
        _spread(out, tile, values, H_kv)
        _spread(lse, tile, denominator, H_kv)
    return out, lse


def together(
    results: Iterable[tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins the results of B sequences: outputs (B, ..., `width`) and log-sum-exps (B, ...). q is (B, ..., D)."""
    out = torch.zeros(*q.shape[:-1], width, dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:-1], dtype=torch.float64, device=q.device)
    for b, sequence_result in enumerate(results):
        out[b], lse[b] = sequence_result
    return out, lse


def error_bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: KeyRange,
    scores: Scores,
    scheme: Scheme,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tolerance of the attention of one sequence: (T, H, Dv) for the output, and (T, H) for the
    log-sum-exp.

    q: (T, H, D); k: (S, H_kv, D); v: (S, H_kv, Dv). Quantised tensors are already multiplied by their scales. The
    caller adds the error of rounding the output to its dtype."""
    (T, H, D), (S, H_kv, _) = q.shape, k.shape
    p_dtype = scheme.activation
    weight_roundoff = torch.finfo(p_dtype).eps / 2
    eta, eta_out = (torch.finfo(kind).smallest_normal * torch.finfo(kind).eps / 2 for kind in (p_dtype, scheme.output))
    err = WALK * (FP8_SUM_ROUNDOFF if p_dtype.itemsize == 1 else FP32_ROUNDOFF)
    sum_error = err * (math.sqrt(S) + 1)
    out = torch.zeros(T, H, v.shape[-1], dtype=torch.float64, device=q.device)
    lses = torch.zeros(T, H, dtype=torch.float64, device=q.device)
    for tile in _pieces(q, k, seen):
        tile_sinks = _of(sinks, tile, H_kv)
        cap_terms = 2 * (scores.softcap or 0.0) + (0.0 if tile_sinks is None else tile_sinks.abs())
        delta = err * math.sqrt(D) * abs(scores.scale) * _largest(q, k, seen, tile) + WALK * FP32_ROUNDOFF * cap_terms
        magnitude = _columns(v, tile).abs().nan_to_num(0.0, 0.0, 0.0)  # there may be NaN where no query sees it
        weighted_magnitude, max_scores, lse = _averaged(_scores(q, k, seen, scores, tile), tile_sinks, magnitude)
        weight_underflow = eta * torch.exp((max_scores - lse).nan_to_num(nan=0.0, neginf=-math.inf))
        absolute_error = (weight_underflow + MIN_NORMAL)[..., None] * _sums(magnitude, seen, tile)[:, None] + eta_out
        relative_error = weight_roundoff + torch.expm1(2 * delta) + sum_error
        _spread(out, tile, relative_error[..., None] * weighted_magnitude + absolute_error, H_kv)
        lse_magnitude = lse.nan_to_num(nan=0.0, neginf=0.0).abs()
        _spread(lses, tile, delta + sum_error + WALK * FP32_ROUNDOFF * lse_magnitude, H_kv)
    return out, lses


def _of(sinks: torch.Tensor | None, piece: Piece, H_kv: int) -> torch.Tensor | None:
    """Returns the attention sinks for the heads of one block of the score matrix: (KV heads, group, 1) in fp64, or
    None."""
    return None if sinks is None else sinks.double().reshape(H_kv, -1)[piece.heads, :, None]


def _largest(q: torch.Tensor, k: torch.Tensor, seen: KeyRange, piece: Piece) -> torch.Tensor:
    """Returns the largest |q| . |k| of each query over its visible keys: (KV heads, group, queries). A query without
    visible keys gets 0."""
    abs_products = _rows(q, piece, k.shape[1]).abs() @ _columns(k, piece).abs().mT
    abs_products = seen.hide(_by_group(abs_products, q, k), piece.rows, piece.keys, 0.0)
    return abs_products.amax(-1) if abs_products.shape[-1] else abs_products.new_zeros(abs_products.shape[:-1])


def _scores(q: torch.Tensor, k: torch.Tensor, seen: KeyRange, scores: Scores, piece: Piece) -> torch.Tensor:
    """Returns one block of attention scores in fp64: (KV heads, group, queries, keys). The score of a hidden key is
    -inf."""
    # The queries are scaled, because there are many more scores.
    logits = (_rows(q, piece, k.shape[1]) * (scores.scale / (scores.softcap or 1.0))) @ _columns(k, piece).mT
    if scores.softcap is not None:
        logits.tanh_().mul_(scores.softcap)
    return seen.hide(_by_group(logits, q, k), piece.rows, piece.keys, -math.inf)


def _by_group(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    heads_per_group = q.shape[1] // k.shape[1]
    return x.reshape(x.shape[0], heads_per_group, x.shape[1] // heads_per_group, x.shape[2])


def _averaged(
    scores: torch.Tensor, sink: torch.Tensor | None, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `softmax(scores) @ values`, the largest score of each query, and the log of its softmax denominator.
    Overwrites `scores` (KV heads, group, queries, keys). A query that sees no key gets the result 0.

    The shape of `values` is (KV heads, keys, Dv). The shape of `sink` is (KV heads, group, 1)."""
    max_scores = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    row_max = max_scores if sink is None else torch.maximum(max_scores, sink)
    row_shift = torch.where(row_max == -math.inf, 0.0, row_max)  # -inf - -inf would be NaN
    weights = scores.sub_(row_shift[..., None]).exp_()
    # A column of ones gives the denominator, without another pass over the weights.
    sums = _weighted(weights.flatten(1, 2), torch.nn.functional.pad(values, (0, 1), value=1.0))
    sums = sums.reshape(*weights.shape[:3], -1)
    sum_w = sums[..., -1] if sink is None else sums[..., -1] + torch.exp(sink - row_shift)
    return sums[..., :-1] / torch.where(sum_w == 0.0, 1.0, sum_w)[..., None], max_scores, row_shift + torch.log(sum_w)


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns `weights @ values`. A weight of 0 removes its value, even an infinite value or a NaN."""
    if bool(values.isfinite().all()):
        return weights @ values
    weighted_sums, weight_mask = weights @ values.nan_to_num(0.0, 0.0, 0.0), (weights > 0).double()
    for nonfinite_value in (math.inf, -math.inf, math.nan):
        special_mask = values.isnan() if math.isnan(nonfinite_value) else values == nonfinite_value
        weighted_sums += torch.where(weight_mask @ special_mask.double() > 0, nonfinite_value, 0.0)
    return weighted_sums


def _sums(magnitude: torch.Tensor, seen: KeyRange, piece: Piece) -> torch.Tensor:
    """Sums `magnitude` (KV heads, keys, Dv) over the visible keys of each query. Returns (KV heads, queries, Dv)."""
    start, end = (
        (range_ends[piece.rows].clamp(piece.keys.start, piece.keys.stop) - piece.keys.start).to(magnitude.device)
        for range_ends in (seen.first, seen.end)
    )
    running_sums = torch.nn.functional.pad(magnitude.cumsum(1), (0, 0, 1, 0))
    return (running_sums[:, end] - running_sums[:, start]).clamp_min_(0.0)


def other_scores(inputs: Inputs, q: str, k: str) -> Iterator[tuple[str, Inputs]]:
    """Yields inputs with a softmax scale other than D**-0.5. Then yields inputs with all scores below -10,000. These
    inputs reveal a kernel that hides keys by a score of -10,000."""
    yield "a softmax_scale of its own", {**inputs, "softmax_scale": 0.6 * inputs[q].shape[-1] ** -0.5}
    yield "a softmax_scale of 0", {**inputs, "softmax_scale": 0.0}
    D = inputs[q].shape[-1]
    qk_offset = 120.0 / D**0.25  # squared, times D, times D**-0.5
    yield "all scores below -10,000", {**inputs, q: inputs[q].abs() + qk_offset, k: -(inputs[k].abs() + qk_offset)}


def low_precision(inputs: Inputs, q: str, k: str, v: str) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs that reveal a kernel with 16-bit intermediate results. They have values of one sign, a
    large score that all keys share, or scores in the thousands. The exponentials of scores in the thousands overflow
    unless the kernel subtracts the largest score.

    `q`, `k` and `v` are the keys of the query, key and value tensors in `inputs`."""
    yield "values of one sign", inputs | {v: (1 + inputs[v].float().abs() / 8).to(inputs[v])}
    shared_score_inputs = {name: inputs[name].clone() for name in (q, k)}
    shared_score_inputs[q][..., 0] = 8.0
    shared_score_inputs[k][..., 0] = 3.0 * math.sqrt(shared_score_inputs[k].shape[-1])
    yield "a large score shared by all keys", inputs | shared_score_inputs
    yield "scores in the thousands", inputs | {name: (30 * inputs[name].float()).to(inputs[name]) for name in (q, k)}


def listen(q: torch.Tensor, k: torch.Tensor) -> None:
    """Prepares q and k for `shout`: sets column 0 to 8 in q, and to 0 in k. `shout` then makes one key dominant."""
    q[..., 0] = 8.0
    k[..., 0] = 0.0


def shout(k: torch.Tensor, v: torch.Tensor, where: tuple[slice | int, ...]) -> None:
    """Makes the key at index `where` dominant: its score becomes 24 above the others. Also makes its row of v large."""
    k[(*where, slice(None), 0)] = 3.0 * math.sqrt(k.shape[-1])
    v[where] = (8.0 * torch.linspace(-1, 1, v.shape[-1])).to(v)


def attention_cost(
    pairs: int, head_dim: int, q: torch.Tensor, read_bytes: float, *, value_dim: int | None = None, lse_rows: int = 0
) -> Cost:
    """Returns the cost of attention with `pairs` visible (query, key) pairs, summed over all heads. The output has the
    shape of q, with `value_dim` (default: `head_dim`) as the last dimension. The op writes `lse_rows` log-sum-exps."""
    value_width = head_dim if value_dim is None else value_dim
    dtype_name = DTYPE_NAMES.get(q.dtype, "fp8_e4m3")
    output_bytes = 2 if q.element_size() == 1 else q.element_size()
    return Cost(
        read_bytes=read_bytes,
        write_bytes=q.numel() // max(1, q.shape[-1]) * value_width * output_bytes + 4 * lse_rows,
        tensor_flops={dtype_name: 2.0 * (head_dim + value_width) * pairs},
        vector_flops=3.0 * pairs,  # scale and shift in one multiply-add, and the sum of the denominator
        sfu_ops=float(pairs),
    )
