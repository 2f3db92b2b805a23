"""The maths that every attention op shares: which keys a query sees, softmax(scores) V, and how far a kernel may err.

A score is q . k * softmax_scale, after a soft cap c (Gemma 2, arXiv 2408.00118) c * tanh(score / c).  Query i of T sees
keys j <= i + S - T when causal (bottom-right aligned), and of those the newest `window` (Mistral 7B, arXiv 2310.06825).
A head's sink (gpt-oss, arXiv 2508.10925) is a score of its own in the denominator, with no value.  The log-sum-exp is
natural and of that denominator.  A row that sees nothing gives 0 and, without a sink, -inf.

The tolerance, per element, with P the exact softmax weights, u_acc = 2**-24 for fp32 accumulation, u_P the unit
roundoff of the dtype in which P enters the second product and u_out that of the output:

    (u_P + expm1(2 * delta) + c * u_acc * (sqrt(S) + 1)) * (P @ |V|)  +  (eta / Z + 2**-126) * sum_j |V_j|
        +  u_out * |ref|  +  eta_out
    delta = c * u_acc * (sqrt(D) * scale * max_j (|Q| |K|^T) + 2 soft cap + |sink|)

A score is a sum of D products, so its error is about u_acc * sqrt(D) times the sum of their magnitudes: that is delta.
A soft cap's slope is at most 1, and its tanh is good to a few u_acc of the cap; a sink is rounded once more where it is
taken to base 2.  delta moves a numerator exp(s) and the denominator sum exp(s) by a factor of at most e^delta each,
hence e^(2 delta) - 1.  Rounding P costs u_P of each term, or eta, half the smallest subnormal, where P underflows; P is
then relative to the row's largest score, and Z is the denominator over that score's exponential, at least 1 (but for
what a larger sink takes).  A weight below fp32's normal numbers may become 0, and an output below those of its dtype is
rounded to whole smallest subnormals, of which eta_out is half.  The second product sums S terms, and the exponential
itself is good to a few u_acc.  sqrt rather than the length: errors of signed sums add as a random walk; c = 4 covers
its tail.  The log-sum-exp errs by delta and by the denominator's sum.

Products of fp8 go through an accumulator of 14 bits on Hopper (`gemm_fp8`): there u_acc is 2**-13 in both products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rooflab.reference.spec import DTYPE_NAMES, FP32_ROUNDOFF, Inputs, Scheme
from rooflab.roofline.model import Cost

WALK = 4.0
"""c of the tolerance: standard deviations of rounding's random walk that are allowed."""
FP8_ACCUMULATION = 2.0**-13
"""u_acc where both factors are fp8: 13 bits behind the leading one, cut off instead of rounded."""
FLUSHED = 2.0**-126
"""Below which a number in fp32 may become 0."""
BLOCK_QUERIES = 128
"""Queries whose scores are held at once: those of 2048 leave the caches over 2048 keys, and take 2.5 times as long."""
TILE_EDGES = (0, 15, 16, 31, 32, 63, 64, 127, 128)
"""Positions at which pages and tiles of the usual sizes begin and end."""


@dataclass(frozen=True)
class Scores:
    """How scores are made of products."""

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Seen:
    """The keys that each of T queries sees: from `first` (T,) up to, not including, `end` (T,), int64 on the CPU."""

    first: torch.Tensor
    end: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """(T,): how many."""
        return self.end - self.first

    def blocks(self) -> Iterator[tuple[slice, Seen]]:
        """`BLOCK_QUERIES` queries at a time, and what they see; one block, of none, where there are none."""
        for start in range(0, max(len(self.end), 1), BLOCK_QUERIES):
            rows = slice(start, start + BLOCK_QUERIES)
            yield rows, Seen(self.first[rows], self.end[rows])

    def mask(self, S: int, device: torch.device) -> torch.Tensor:
        """(T, S): True where a query sees a key."""
        keys = torch.arange(S, device=device)
        return (keys >= self.first.to(device)[:, None]) & (keys < self.end.to(device)[:, None])


def seen_keys(T: int, S: int, causal: bool, window: int | None = None) -> Seen:
    """What T queries see of S keys.  Raises `ValueError` on a window that is not causal, or below 1."""
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window: expected at least 1, and causal=True, got {window} and causal={causal}")
    end = (torch.arange(T) + S - T + 1).clamp(0, S) if causal else torch.full((T,), S)
    first = torch.zeros_like(end) if window is None else (torch.arange(T) + S - T + 1 - window).clamp(0, S)
    return Seen(first.minimum(end), end)


def get_scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """`softmax_scale`, or D**-0.5 for None."""
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Seen,
    scores: Scores,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's attention in fp64: the output and the log-sum-exp.

    q: (T, H, D); k: (S, H_kv, D); v: (S, H_kv, Dv); sinks: (H,); returns (T, H, Dv) and (T, H).
    """
    found = [_attend(q[rows], k, v, part, scores, sinks) for rows, part in seen.blocks()]
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
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
    """What the module derives for one sequence: (T, H, Dv) without u_out * |ref|, and (T, H) of the log-sum-exp.

    q, k and v as in `attend`, scaled back if they were quantised.
    """
    found = [_error_bounds(q[rows], k, v, part, scores, scheme, sinks) for rows, part in seen.blocks()]
    out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
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
    """Of one head, (T, S) fp64; -inf where a query does not see a key."""
    found = q.double() @ k.double().mT * scores.scale
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    return found.masked_fill(~seen.mask(k.shape[0], q.device), -math.inf)


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (T, S), and the log of their denominator (T,); a row that sees no key is all 0."""
    if sink is not None:
        scores = torch.cat([scores, sink.double().to(scores.device).expand(len(scores), 1)], dim=1)
    if scores.shape[1] == 0:
        return scores, scores.new_full((len(scores),), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[:, None]).masked_fill(lse[:, None] == -math.inf, 0.0)
    return (weights if sink is None else weights[:, :-1]), lse


def low_precision(inputs: Inputs, q: str, k: str, v: str) -> Iterator[tuple[str, Inputs]]:
    """Inputs on which 16-bit intermediates show: sums that do not cancel, and a large score that all keys share; and
    scores in the thousands, whose exponentials overflow by themselves.

    `q`, `k` and `v` name the arguments. On random data the rounding of the weights to 16 bits hides the first two.
    """
    yield "values of one sign", inputs | {v: (1 + inputs[v].float().abs() / 8).to(inputs[v])}
    shared = {name: inputs[name].clone() for name in (q, k)}
    shared[q][..., 0] = 8.0
    shared[k][..., 0] = 3.0 * math.sqrt(shared[k].shape[-1])
    yield "a large score shared by all keys", inputs | shared
    yield "scores in the thousands", inputs | {name: (30 * inputs[name].float()).to(inputs[name]) for name in (q, k)}


def listen(q: torch.Tensor, k: torch.Tensor) -> None:
    """Gives every query one direction in which no key has anything yet."""
    q[..., 0] = 8.0
    k[..., 0] = 0.0


def shout(k: torch.Tensor, v: torch.Tensor, where: tuple[slice | int, ...]) -> None:
    """Makes the key at `where` outweigh all others: a score of 24 above theirs, and a value that none of them has."""
    k[(*where, slice(None), 0)] = 3.0 * math.sqrt(k.shape[-1])
    v[where] = (8.0 * torch.linspace(-1, 1, v.shape[-1])).to(v)


def attention_cost(
    pairs: int, head_dim: int, q: torch.Tensor, read_bytes: float, *, value_dim: int | None = None, lse_rows: int = 0
) -> Cost:
    """Cost of attention over `pairs` visible (query, key) pairs, heads counted; the output has the shape of q.

    `value_dim` where it is not the head's own; `lse_rows` log-sum-exps are written too.
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
