"""The maths that every attention op shares: which keys a query sees, softmax(scores) V, and how far a kernel may err.

A score is q . k * softmax_scale; a soft cap c (Gemma 2, arXiv 2408.00118) makes it c * tanh(score / c).  With `causal`,
query i of T sees the keys j <= i + S - T (bottom-right aligned); with a window (Mistral 7B, arXiv 2310.06825) only the
newest `window` of them.  A head's sink (gpt-oss, arXiv 2508.10925) adds one score to the denominator, without a value.
The log-sum-exp is the natural logarithm of the denominator.  A query that sees no key gives the output 0, and without a
sink the log-sum-exp -inf.

The tolerance of each element, with the exact softmax weights P, u_acc = 2**-24 for fp32 accumulation, the unit roundoff
u_P of the dtype in which P enters the second product, and the unit roundoff u_out of the output:

    (u_P + expm1(2 * delta) + c * u_acc * (sqrt(S) + 1)) * (P @ |V|)  +  (eta / Z + 2**-126) * sum_j |V_j|
        +  u_out * |ref|  +  eta_out
    delta = c * u_acc * (sqrt(D) * scale * max_j (|Q| |K|^T) + 2 soft cap + |sink|)

delta is the error of a score: a score sums D products, and errs by about u_acc * sqrt(D) times the sum of their
magnitudes.  A soft cap has a slope of at most 1, and its tanh errs by a few u_acc of the cap.  A conversion to base 2
rounds a sink once more.  delta moves a numerator exp(s) and the denominator sum exp(s) by a factor of at most e^delta
each, hence e^(2 delta) - 1.  Rounding P costs u_P of each term.  Where P underflows, it costs eta, half the smallest
subnormal; P is then relative to the row's largest score, and Z is the denominator over that score's exponential: at
least 1, unless a sink is larger.  A weight below fp32's normal numbers may become 0.  An output below the normal
numbers of its dtype is rounded to a multiple of the smallest subnormal, and eta_out is half of that.  The second
product sums S terms, and the exponential itself errs by a few u_acc.  The terms have sqrt(D) and sqrt(S), because
errors of signed sums add up as a random walk; c = 4 covers its tail.  The log-sum-exp errs by delta and by the
denominator's sum.

Hopper's accumulator for fp8 products has 14 bits (`gemm_fp8`): u_acc is then 2**-13 in both products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rooflab.reference.domain import Axis, Sizes
from rooflab.reference.spec import DTYPE_NAMES, FP32_ROUNDOFF, Case, Inputs, Scheme
from rooflab.roofline.model import Cost

WALK = 4.0
"""c of the tolerance: how many standard deviations of the rounding errors' random walk are allowed."""
FP8_ACCUMULATION = 2.0**-13
"""u_acc where both factors are fp8: 13 bits behind the leading one, cut off instead of rounded."""
FLUSHED = 2.0**-126
"""An fp32 number smaller than this may become 0."""
BLOCK_QUERIES = 128
"""Queries whose scores are held at once. The scores of 2048 queries over 2048 keys take 2.5 times as long: they do not
fit the CPU's caches."""
TILE_EDGES = (0, 15, 16, 31, 32, 63, 64, 127, 128)
"""Positions at which pages and tiles of the usual sizes begin and end."""


HEADS: Mapping[str, Axis] = {"H_kv": Sizes(1, 16), "group": (1, 2, 3, 5, 8, 16), "D": (64, 128, 80, 96, 192, 256)}
"""Axes of a domain: the heads of keys, the heads of queries for each of them, and the values of a head."""
OPTIONS = {"window": (0, 1, 17, 64, 100, 513), "softcap": (0.0, 20.0), "sinks": (False, True), "lse": (False, True)}


def with_heads(H_kv: int, group: int, equal: bool = False, **values: Any) -> Case | None:
    """The case of these values, with S = T where they are `equal`; None for a window without `causal`."""
    if values.get("window") and not values.get("causal", True):
        return None
    return Case(H=group * H_kv, H_kv=H_kv, **values | ({"S": values["T"]} if equal else {}))


@dataclass(frozen=True)
class Scores:
    """How a product q . k becomes a score."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Seen:
    """The keys that each of T queries sees: from `first` (T,) up to, not including, `end` (T,), int64 on the CPU."""

    first: torch.Tensor
    end: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """(T,): the number of keys that each query sees."""
        return self.end - self.first

    def blocks(self) -> Iterator[tuple[slice, Seen]]:
        """The queries in blocks of `BLOCK_QUERIES`, with the keys that they see; one empty block if T is 0."""
        for start in range(0, max(len(self.end), 1), BLOCK_QUERIES):
            rows = slice(start, start + BLOCK_QUERIES)
            yield rows, Seen(self.first[rows], self.end[rows])

    def mask(self, S: int, device: torch.device) -> torch.Tensor:
        """(T, S): True where a query sees a key."""
        keys = torch.arange(S, device=device)
        return (keys >= self.first.to(device)[:, None]) & (keys < self.end.to(device)[:, None])


def seen_keys(T: int, S: int, causal: bool, window: int | None = None) -> Seen:
    """Which of S keys each of T queries sees.  Raises `ValueError` on a window without `causal`, or below 1."""
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window: expected at least 1, and causal=True, got {window} and causal={causal}")
    end = (torch.arange(T) + S - T + 1).clamp(0, S) if causal else torch.full((T,), S)
    first = torch.zeros_like(end) if window is None else (torch.arange(T) + S - T + 1 - window).clamp(0, S)
    return Seen(first.minimum(end), end)


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """`softmax_scale`, or D**-0.5 for None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scores: Scores, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's attention in fp64: the output and the log-sum-exp.

    q: (T, H, D); k: (S, H_kv, D); v: (S, H_kv, Dv); sinks: (H,); returns (T, H, Dv) and (T, H).
    """
    results = [_attend(q[rows], k, v, part, scores, sinks) for rows, part in seen.blocks()]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scores: Scores, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for h in range(q.shape[1]):
        logits = _scores(q[:, h], k[:, h // group], seen, scores)
        weights, lse = _softmax(logits, None if sinks is None else sinks[h])
        outs.append(weights @ v[:, h // group].double())
        lses.append(lse)
    return torch.stack(outs, dim=1), torch.stack(lses, dim=1)


def error_bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Seen,
    scores: Scores,
    scheme: Scheme,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The module's tolerance for one sequence: (T, H, Dv) without u_out * |ref|, and (T, H) for the log-sum-exp.

    q, k and v as in `attend`; quantised ones are multiplied by their scales before.
    """
    bounds = [_error_bounds(q[rows], k, v, part, scores, scheme, sinks) for rows, part in seen.blocks()]
    out, lse = (torch.cat(parts) for parts in zip(*bounds, strict=True))
    return out, lse


def _error_bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Seen,
    scores: Scores,
    scheme: Scheme,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    S, D = k.shape[0], q.shape[-1]
    group = q.shape[1] // k.shape[1]
    weight = scheme.activation
    roundoff = torch.finfo(weight).eps / 2
    eta, eta_out = (torch.finfo(kind).smallest_normal * torch.finfo(kind).eps / 2 for kind in (weight, scheme.output))
    walk = WALK * (FP8_ACCUMULATION if weight.itemsize == 1 else FP32_ROUNDOFF)
    mask = seen.mask(S, q.device)
    outs, lses = [], []
    for h in range(q.shape[1]):
        magnitude = v[:, h // group].double().abs()
        products = q[:, h].double().abs() @ k[:, h // group].double().abs().mT
        largest = products.masked_fill(~mask, 0.0).amax(-1) if S else products.new_zeros(len(q))
        sink = None if sinks is None else sinks[h]
        other = 2 * (scores.softcap or 0.0) + (0.0 if sink is None else float(sink.abs()))
        delta = walk * math.sqrt(D) * abs(scores.scale) * largest + WALK * FP32_ROUNDOFF * other
        logits = _scores(q[:, h], k[:, h // group], seen, scores)
        weights, lse = _softmax(logits, sink)
        total = walk * (math.sqrt(S) + 1)
        relative = roundoff + torch.expm1(2 * delta) + total
        peak = logits.amax(-1) if S else logits.new_full((len(q),), -math.inf)
        underflow = eta * torch.exp((peak - lse).nan_to_num(nan=0.0, neginf=-math.inf))
        small = (underflow + FLUSHED)[:, None] * (mask.double() @ magnitude) + eta_out
        outs.append(relative[:, None] * (weights @ magnitude) + small)
        finite = lse.nan_to_num(nan=0.0, neginf=0.0).abs()
        lses.append(delta + total + WALK * FP32_ROUNDOFF * finite)
    return torch.stack(outs, dim=1), torch.stack(lses, dim=1)


def _scores(q: torch.Tensor, k: torch.Tensor, seen: Seen, scores: Scores) -> torch.Tensor:
    """The scores of one head, (T, S) fp64; -inf where a query does not see a key."""
    logits = q.double() @ k.double().mT * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    return logits.masked_fill(~seen.mask(k.shape[0], q.device), -math.inf)


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights (T, S), and the log of their denominator (T,); the weights of a query that sees no key are 0."""
    if sink is not None:
        scores = torch.cat([scores, sink.double().to(scores.device).expand(len(scores), 1)], dim=1)
    if scores.shape[1] == 0:
        return scores, scores.new_full((len(scores),), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[:, None]).masked_fill(lse[:, None] == -math.inf, 0.0)
    return (weights if sink is None else weights[:, :-1]), lse


def other_scores(inputs: Inputs, q: str, k: str) -> Iterator[tuple[str, Inputs]]:
    """A scale that is not D**-0.5; then scores that are all below -10,000, where a mask of -10,000 is no mask."""
    yield "a softmax_scale of its own", {**inputs, "softmax_scale": 0.6 * inputs[q].shape[-1] ** -0.5}
    D = inputs[q].shape[-1]
    far = 120.0 / D**0.25  # squared, times D, times D**-0.5
    yield "all scores below -10,000", {**inputs, q: inputs[q].abs() + far, k: -(inputs[k].abs() + far)}


def low_precision(inputs: Inputs, q: str, k: str, v: str) -> Iterator[tuple[str, Inputs]]:
    """Inputs that reveal 16-bit intermediates: sums that do not cancel, and a large score that all keys share. Then
    scores in the thousands, whose exponentials overflow unless the largest score is subtracted.

    `q`, `k` and `v` name the arguments. On random data the rounding of the weights to 16 bits hides the first two.
    """
    yield "values of one sign", inputs | {v: (1 + inputs[v].float().abs() / 8).to(inputs[v])}
    shared = {name: inputs[name].clone() for name in (q, k)}
    shared[q][..., 0] = 8.0
    shared[k][..., 0] = 3.0 * math.sqrt(shared[k].shape[-1])
    yield "a large score shared by all keys", inputs | shared
    yield "scores in the thousands", inputs | {name: (30 * inputs[name].float()).to(inputs[name]) for name in (q, k)}


def listen(q: torch.Tensor, k: torch.Tensor) -> None:
    """Makes every query large in column 0, and every key zero there."""
    q[..., 0] = 8.0
    k[..., 0] = 0.0


def shout(k: torch.Tensor, v: torch.Tensor, where: tuple[slice | int, ...]) -> None:
    """Makes the key at `where` outweigh all others: its score is 24 above theirs, and its value is unlike theirs."""
    k[(*where, slice(None), 0)] = 3.0 * math.sqrt(k.shape[-1])
    v[where] = (8.0 * torch.linspace(-1, 1, v.shape[-1])).to(v)


def attention_cost(
    pairs: int, head_dim: int, q: torch.Tensor, read_bytes: float, *, value_dim: int | None = None, lse_rows: int = 0
) -> Cost:
    """Cost of attention over `pairs` visible (query, key) pairs, summed over heads; the output has the shape of q.

    `value_dim`: the width of a value, if it is not `head_dim`. `lse_rows`: how many log-sum-exps are written too.
    """
    wide = head_dim if value_dim is None else value_dim
    name = DTYPE_NAMES.get(q.dtype, "fp8_e4m3")
    size = 2 if q.element_size() == 1 else q.element_size()
    return Cost(
        read_bytes=read_bytes,
        write_bytes=q.numel() // max(1, q.shape[-1]) * wide * size + 4 * lse_rows,
        tensor_flops={name: 2.0 * (head_dim + wide) * pairs},
        vector_flops=3.0 * pairs,  # scale and shift in one multiply-add, and the sum of the denominator
        sfu_ops=float(pairs),
    )
