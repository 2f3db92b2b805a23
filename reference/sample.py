"""Drawing one token per row of logits: penalties, temperature, top-k, top-p, min-p, a reproducible Gumbel-max draw.

Before the draw a row's logits may be edited: a bias and the penalties of the tokens that were there, and a mask of the
tokens that are allowed. The draw is an exponential race: argmax of log p - log E, with E exponential, is a draw from p.
E is keyed by seed, position and token (`philox.race`). So a row's token depends only on its own logits, seed and
position, and not on the other rows; every correct kernel draws the same token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.philox import race
from rooflab.reference.sample_rules import Edits, check_args
from rooflab.reference.spec import FP32_ROUNDOFF, Case, Inputs, OpSpec, Outputs, Scalar, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

MASS_TOLERANCE = 4e-6
"""fp32's error of a cumulative probability: a token this close to top_p may be in the support or not."""
EDITED = ("logits", "repetition_penalty", "presence_penalty", "frequency_penalty") + (
    *("edit_offsets", "edit_ids", "edit_counts", "edit_bias"),
    "allowed",
)
"""The arguments that decide a row's logits."""
SCORE_ULPS = 16.0
"""fp32's error of a score, in roundoffs of each term: a subtraction, a division and two logarithms."""


@dataclass(frozen=True)
class Support:
    """The tokens that one row may draw, with their probabilities.  All tensors are (V,)."""

    probabilities: torch.Tensor
    """Probabilities of the draw in fp64, renormalised over `kept`; 0 elsewhere."""
    kept: torch.Tensor
    """Whether a token is in the support, by fp64 arithmetic."""
    doubtful: torch.Tensor
    """Whether a token is so near to top_p or min_p that fp32 may put it on either side."""
    scores: torch.Tensor
    """logits / temperature in fp64."""


def support(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Support:
    """The support of one row's draw; temperature > 0.  logits: (V,).

    Tokens are ordered by probability descending, then index ascending. top_k keeps the first k tokens and renormalises.
    Of these, top_p keeps a token if the cumulative probability before it is below top_p, so the token that crosses
    top_p stays. min_p keeps tokens of at least min_p times the largest probability. A logit of -inf is never drawn.
    """
    scores = logits.detach().cpu().double() / temperature
    n = min(top_k or len(scores), int((scores > -math.inf).sum()))
    # Only the values of the first n are sorted: of 128,256 in 2 to 5 ms, all with their ids in 12 (one EPYC core).
    ordered = torch.from_numpy(np.sort(np.partition(scores.numpy(), len(scores) - n)[len(scores) - n :])[::-1].copy())
    ranked = torch.exp(ordered[:n] - ordered[0])
    # With 2**n equal weights, every sum and quotient is exact in fp32, and there is no doubt.
    exact = bool((ranked == 1).all()) and n & (n - 1) == 0
    kept = within = _first(scores, ordered, n)
    doubtful = torch.zeros_like(kept)
    if top_p < 1:
        through = (ranked / ranked.sum()).cumsum(0)
        before = torch.cat([through.new_zeros(1), through[:-1]])
        kept = _first(scores, ordered, int((before < top_p).sum()))
        if not exact:
            near = (int((before - top_p < limit).sum()) for limit in (-MASS_TOLERANCE, MASS_TOLERANCE))
            doubtful = torch.logical_xor(*(_first(scores, ordered, count) for count in near))
    gap = ordered[0] - scores
    weights = torch.exp(-gap)
    if min_p > 0:
        kept = kept & (weights >= min_p)
        if not exact:
            doubtful |= within & ((gap + math.log(min_p)).abs() <= SCORE_ULPS * FP32_ROUNDOFF * (gap + 1))
    law = torch.where(kept, weights, 0.0)
    return Support(law / law.sum(), kept, doubtful, scores)


def _first(scores: torch.Tensor, ordered: torch.Tensor, count: int) -> torch.Tensor:
    """Which tokens (V,) are the first `count` by score descending, then index ascending; `ordered` has the scores."""
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    above, ties = scores > ordered[count - 1], scores == ordered[count - 1]
    return above | (ties & (ties.cumsum(0) <= count - above.sum()))


def edited(
    logits: torch.Tensor,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    edit_offsets: torch.Tensor | None = None,
    edit_ids: torch.Tensor | None = None,
    edit_counts: torch.Tensor | None = None,
    edit_bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits (B, V) in fp32 on the CPU after edits and mask; the arguments are those of `reference`.

    Every operation is rounded to fp32, so that each kernel has the same logits, and the same ties.
    """
    rows = logits.detach().cpu().float().numpy().copy()
    if edit_offsets is not None and edit_ids is not None and edit_counts is not None and edit_bias is not None:
        B = len(rows)
        once = np.ones(B, np.float32), np.zeros(B, np.float32), np.zeros(B, np.float32)
        given = (repetition_penalty, presence_penalty, frequency_penalty)
        penalties = [off if value is None else value.cpu().numpy() for value, off in zip(given, once, strict=True)]
        ends, ids, counts = edit_offsets.tolist(), edit_ids.tolist(), edit_counts.tolist()
        bias = edit_bias.cpu().numpy()
        for b in range(B):
            repetition, presence, frequency = (values[b] for values in penalties)
            for i in range(ends[b], ends[b + 1]):
                x = rows[b, ids[i]] + bias[i]
                if counts[i] >= 0:
                    x = x / repetition if x > 0 else x * repetition
                if counts[i] > 0:
                    x = x - (frequency * np.float32(counts[i]) + presence)
                rows[b, ids[i]] = x
    if allowed is not None:
        bits = np.unpackbits(allowed.cpu().contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
        rows[bits[:, : rows.shape[1]] == 0] = -math.inf
    return torch.from_numpy(rows)


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    edit_offsets: torch.Tensor | None = None,
    edit_ids: torch.Tensor | None = None,
    edit_counts: torch.Tensor | None = None,
    edit_bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    top_n: int | None = None,
) -> torch.Tensor | Outputs:
    """One token id per row, (B,) int64: the argmax over the support of logits / temperature - log E.

    logits: (B, V) of any float dtype, finite or -inf; temperature: (B,) fp32, 0 = the highest logit; top_k: (B,)
    int32, 0 = off; top_p: (B,) fp32 in (0, 1], 1 = off; min_p: (B,) fp32, 0 = off; seed, position: (B,) int64; only
    the low 32 bits of a position count. Ties go to the lowest index.

    Edits of a row come first. edit_offsets: (B + 1,) int32; row b edits the tokens edit_ids[offsets[b]:offsets[b + 1]],
    each once; edit_ids, edit_counts: (N,) int32; edit_bias: (N,) fp32, which may be -inf. x = logit + bias; with a
    count >= 0 x is divided by the repetition penalty, or multiplied if x <= 0 (Keskar et al., "CTRL", 2019); with a
    count > 0 frequency_penalty * count + presence_penalty is subtracted. A count of 0 stands for a token of the prompt
    alone, -1 for a bias alone. The penalties are (B,) fp32. allowed: (B, ceil(V / 32)) int32, a bit for each token;
    the others are never drawn.

    With `top_n` also ids (B, 1 + top_n) int64 and log-probabilities (B, 1 + top_n): of the drawn token, then of the
    likeliest by the logits as they came, before edits and temperature. Raises `ValueError` on a row that has a NaN, a
    +inf or no finite logit after the edits; on a GPU, where no kernel can raise, such a row has some id in [0, V).
    """
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    edits = Edits(*penalties, edit_offsets, edit_ids, edit_counts, edit_bias, allowed)
    check_args(logits, temperature, top_k, top_p, min_p, seed, position, edits, top_n)
    rows = edited(logits, **edits.tensors)
    settings = zip(*(t.tolist() for t in (temperature, top_k, top_p, min_p, seed, position)), strict=True)
    tokens = []
    for b, (row, (t, k, p, m, s, n)) in enumerate(zip(rows, settings, strict=True)):
        if not math.isfinite(row.max().item()):  # torch's max is NaN if there is one
            raise ValueError(f"logits: row {b}: expected a finite largest value, got {row.max().item()}")
        if t == 0:
            tokens.append(int(row.argmax()))
            continue
        law = support(row, t, k, p, m)
        tokens.append(int((law.scores - race(s, n, len(row))).masked_fill(~law.kept, -math.inf).argmax()))
    drawn = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    if top_n is None:
        return drawn
    likely = torch.sort(logits.double(), dim=-1, descending=True, stable=True)[1][:, :top_n]
    ids = torch.cat([drawn[:, None], likely], dim=1)
    return drawn, ids, logits.double().log_softmax(-1).gather(1, ids)


def compare(actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
    """A greedy token must equal the oracle's; a drawn token must be in the support and win the race.

    In the support: by fp64 arithmetic, or within `MASS_TOLERANCE` of its edge unless the row's arithmetic is exact.
    Wins: its fp64 score is below the best score of a token certainly in the support by at most fp32's error of both.
    With g = (best logit - logit) / T an fp32 score errs by at most `SCORE_ULPS` * 2**-24 * (|score| + g + |log E| + 1).
    """
    return _compare(actual, oracle, inputs, wins=True)


def compare_own_stream(actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
    """`compare` for a kernel with a random stream of its own: a drawn token must be in the support, or as likely as a
    token that is, for such kernels cut by value."""
    return _compare(actual, oracle, inputs, wins=False)


def _compare(actual: Outputs, oracle: Outputs, inputs: Inputs, wins: bool) -> list[ErrorStats]:
    drawn, expected = actual[0], oracle[0].cpu()
    if drawn.shape != expected.shape or drawn.dtype != torch.int64:
        note = f"expected {tuple(expected.shape)} int64, got {tuple(drawn.shape)} {drawn.dtype}"
        bad = ErrorStats("tokens", False, math.nan, math.inf, expected.numel(), expected.numel(), note=note)
        return [bad, *_compare_logprobs(actual, oracle, inputs)]
    rows = edited(**{name: value for name, value in inputs.items() if name in EDITED})
    worst, worst_row, wrong, largest = 0.0, 0, 0, 0.0
    for b, (token, best) in enumerate(zip(drawn.tolist(), expected.tolist(), strict=True)):
        if token == best:
            continue
        error, ratio = _judge_row(token, best, rows[b], inputs, b, wins)
        wrong += not ratio <= 1
        if not ratio <= worst:
            worst, worst_row, largest = ratio, b, error
    tokens = ErrorStats("tokens", wrong == 0, largest, worst, wrong, expected.numel(), (worst_row,) if wrong else ())
    return [tokens, *_compare_logprobs(actual, oracle, inputs)]


def _compare_logprobs(actual: Outputs, oracle: Outputs, inputs: Inputs) -> list[ErrorStats]:
    """The drawn token's id is that of the kernel itself; the others are exact, because nothing is rounded before them.
    The error of a log-probability is that of the sum and that of a score."""
    if len(oracle) == 1:
        return []
    logits = inputs["logits"].detach().cpu().double()
    V = logits.shape[1]
    wanted = torch.cat([actual[0].cpu()[:, None].clamp(0, V - 1), oracle[1].cpu()[:, 1:]], dim=1)
    likely = logits.log_softmax(-1).gather(1, wanted)
    gap = (logits.max(-1, keepdim=True).values - logits.gather(1, wanted)).nan_to_num(posinf=0.0)
    limit = MASS_TOLERANCE + SCORE_ULPS * FP32_ROUNDOFF * (gap + likely.abs().nan_to_num(posinf=0.0) + 1)
    ids = elementwise("logprob_ids", actual[1].cpu(), wanted, torch.zeros_like(likely))
    return [ids, elementwise("logprobs", actual[2].cpu(), likely, limit)]


def _judge_row(token: int, best: int, row: torch.Tensor, inputs: Inputs, b: int, wins: bool) -> tuple[float, float]:
    """The difference between the scores of `best` and `token`, and that difference over the allowed one."""
    settings = [inputs[name][b].item() for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")]
    if not 0 <= token < len(row) or settings[0] == 0:
        return math.inf, math.inf
    if not wins:
        return (0.0, 0.0) if _tied_or_in_support(row, token, *settings[:4]) else (math.inf, math.inf)
    law = support(row, *settings[:4])
    if not bool(law.kept[token] | law.doubtful[token]):
        return math.inf, math.inf
    noise = race(settings[4], settings[5], len(row))
    scores = law.scores - noise
    certain = law.kept & ~law.doubtful
    if bool(certain.any()):
        best = int(scores.masked_fill(~certain, -math.inf).argmax())
    allowed = 0.0
    for i in (token, best):
        gap = float(law.scores.max() - law.scores[i])
        allowed += SCORE_ULPS * FP32_ROUNDOFF * (abs(float(law.scores[i])) + gap + abs(float(noise[i])) + 1)
    error = max(0.0, float(scores[best] - scores[token]))
    return error, error / allowed


def _tied_or_in_support(
    row: torch.Tensor, token: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> bool:
    """Whether `token` is in the row's support if the ties at its edge are too.  It sorts nothing, because with a stream
    of its own a kernel draws another token in almost every row."""
    scores = row.double() / temperature
    above = scores > scores[token]
    weights = torch.exp(scores - scores.max())
    total = weights.topk(top_k).values.sum() if 0 < top_k < len(row) else weights.sum()
    return bool(
        (scores[token] > -math.inf)
        & (above.sum() < (top_k or len(row)))
        & (weights[above].sum() < (top_p + MASS_TOLERANCE) * total)
        & (weights[token] >= min_p * (1 - MASS_TOLERANCE))
    )


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Normal logits of standard deviation `sigma`, by default 3, about a language model's; every row has the case's
    settings.  With `penalties` a row edits up to 24 tokens, and with `allowed` about half of the tokens may be drawn.
    """
    B, V = int(case["B"]), int(case["V"])
    sigma, top_n = float(case.get("sigma", 3.0)), int(case.get("top_n", 0))
    logits = randn(B, V, dtype=scheme.activation, device=device, seed=seed, scale=sigma)
    one = (float(case["temperature"]), int(case["top_k"]), float(case["top_p"]), float(case["min_p"]))
    inputs = {"logits": logits} | settings([one] * B, device, seed)
    if case.get("penalties"):
        inputs |= _edits(B, V, device, seed)
    if case.get("allowed"):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.randint(-(2**31), 2**31, (B, -(-V // 32)), generator=generator, dtype=torch.int32)
        mask[:, 0] |= 1  # token 0, which no edit removes: a row keeps a law
        inputs["allowed"] = mask.to(_place(device))
    return inputs | ({"top_n": top_n} if top_n else {})


def _place(device: torch.device) -> torch.device:
    """Where small tensors lie, which are never on `meta`."""
    return torch.device("cpu" if torch.device(device).type == "meta" else device)


def _edits(B: int, V: int, device: torch.device, seed: int) -> Inputs:
    """Penalties for each row, and edits of tokens after token 0 with counts from -1 to 3, some of them to -inf."""
    generator = torch.Generator().manual_seed(seed)
    n = min(V - 1, 24)
    N = B * n
    ids = torch.stack([torch.randperm(V - 1, generator=generator)[:n] + 1 for _ in range(B)])
    bias = torch.randn(N, generator=generator)
    bias[torch.rand(N, generator=generator) < 0.2] = -math.inf
    inputs = {
        "repetition_penalty": torch.tensor([1.3, 0.7, 1.0])[torch.arange(B) % 3],
        "presence_penalty": torch.tensor([0.5, -0.5])[torch.arange(B) % 2],
        "frequency_penalty": torch.tensor([0.25, 0.0, 1.1, -0.3])[torch.arange(B) % 4],
        "edit_offsets": torch.arange(B + 1, dtype=torch.int32) * n,
        "edit_ids": ids.flatten().int(),
        "edit_counts": torch.randint(-1, 4, (N,), generator=generator, dtype=torch.int32),
        "edit_bias": bias,
    }
    return {name: value.to(_place(device)) for name, value in inputs.items()}


def settings(rows: list[tuple[float, int, float, float]], device: torch.device, seed: int) -> Inputs:
    """The per-row tensors for `(temperature, top_k, top_p, min_p)` rows, with random seeds and positions."""
    generator = torch.Generator().manual_seed(seed)
    B = len(rows)
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    names = ("temperature", "top_k", "top_p", "min_p")
    inputs = {
        name: torch.tensor(column, dtype=dtype) for name, column, dtype in zip(names, columns, dtypes, strict=True)
    }
    inputs["seed"] = torch.randint(-(2**62), 2**62, (B,), generator=generator)
    inputs["position"] = torch.randint(0, 2**20, (B,), generator=generator)
    return {name: value.to(_place(device)) for name, value in inputs.items()}


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Rows whose arithmetic is exact: 2**n equal logits and -inf, so that one wrong token in the support shows.

    Then one large logit; rows of one batch with different settings, greedy among them; and edits that decide.  A case
    without min_p plants neither min_p nor greedy rows beside others: a kernel may lack them.
    """
    V = int(case["V"])
    ties = (
        ("top_k cuts ties by index", 4, (1.0, 3, 1.0, 0.0)),
        ("top_p reached exactly keeps no more", 4, (0.7, 0, 0.5, 0.0)),
        ("top_p keeps the token that crosses", 4, (1.0, 0, 0.5 + 2.0**-20, 0.0)),
        ("top_p after top_k, renormalised", 8, (1.0, 4, 0.25, 0.0)),
        ("min_p keeps ties with the best", 2, (1.0, 0, 1.0, 1.0)),
        ("tiny top_p keeps one", 8, (2.0, 0, 1e-9, 0.0)),
        ("one token", 1, (1.5, 0, 0.9, 0.1)),
    )
    for (label, count, setting), rows in zip(ties, (64, 8, 1, 8, 1, 1, 1), strict=True):
        if count > V or (setting[3] and not case["min_p"]):
            continue
        logits = torch.full((rows, V), -math.inf)
        generator = torch.Generator().manual_seed(seed)
        for row in logits:
            row[torch.randperm(V, generator=generator)[:count]] = 0.5
        inputs = {"logits": logits.to(device, scheme.activation)} | settings([setting] * rows, device, seed)
        yield label, inputs
    for place in sorted({0, V // 2, V - 1}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["logits"][:, place] = 200.0
        yield f"token {place} dominates", inputs
    # Whole numbers tie often; among ties the lowest index wins.
    logits = randn(8, V, dtype=torch.float32, device=device, seed=seed, scale=3.0).round()
    kinds = [(0.7, 40, 1.0, 0.0), (1.0, 0, 0.9, 0.0)]
    kinds += [(0.0, 0, 1.0, 0.0), (1.3, 0, 1.0, 0.1)] if case["min_p"] else kinds
    own = settings(kinds * 2, device, seed)
    yield "rows with settings of their own", {"logits": logits.to(scheme.activation)} | own
    yield "all logits below -10,000", {"logits": (logits - 20_000).to(scheme.activation)} | own
    yield (
        "a penalty, a bias and a mask decide",
        {"logits": logits.to(scheme.activation)} | own | _deciding(8, V, device),
    )


def _deciding(B: int, V: int, device: torch.device) -> Inputs:
    """The first token gets a bias of 100, the last one, biased by 150, is penalised by 300, or masked in odd rows."""
    last = V - 1
    mask = torch.full((B, -(-V // 32)), -1, dtype=torch.int32)
    mask[1::2, last // 32] ^= torch.tensor(1).bitwise_left_shift(last % 32).int()
    each = [(0, -1, 100.0)] + ([(last, 2, 150.0)] if last else [])
    ids, counts, bias = (torch.tensor(column).repeat(B) for column in zip(*each, strict=True))
    edits = {
        "repetition_penalty": torch.full((B,), 1.5),
        "presence_penalty": torch.full((B,), 100.0),
        "frequency_penalty": torch.full((B,), 100.0),
        "edit_offsets": torch.arange(B + 1, dtype=torch.int32) * len(each),
        "edit_ids": ids.int(),
        "edit_counts": counts.int(),
        "edit_bias": bias,
        "allowed": mask if last else torch.full_like(mask, -1),
        "top_n": min(3, V),
    }
    return {
        name: value.to(_place(device)) if isinstance(value, torch.Tensor) else value for name, value in edits.items()
    }


def cost(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    top_n: int | None = None,
    **edits: torch.Tensor | None,
) -> Cost:
    """Each logit is read once.  top_p needs an exponential for each token that top_k left; each token in the race needs
    two logarithms.  After top_p or min_p only one token is counted, because the number depends on the logits.
    Log-probabilities need an exponential for each token."""
    B, V = logits.shape
    sfu = 0 if top_n is None else B * V
    for t, k, p, m in zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        if t > 0:
            left = min(k, V) if k else V
            sfu += (left if p < 1 else 0) + 2 * (left if p == 1 and m == 0 else 1)
    return Cost(
        read_bytes=nbytes(logits, temperature, top_k, top_p, min_p, seed, position, *edits.values()),
        write_bytes=8 * B + (0 if top_n is None else 12 * B * (1 + top_n)),
        vector_flops=float(B * V),  # one comparison each; Philox is integer work
        sfu_ops=float(sfu),
    )


def _case(B: int, V: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Case:
    return Case(B=B, V=V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def _model(V: int) -> tuple[Case, ...]:
    kinds = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 50, 0.95), (0.8, 0, 0.95))
    return tuple(_case(B, V, *kind) for B in (1, 16) for kind in kinds)


def _drawn(V: int, top_n: int, **values: Scalar) -> Case | None:
    """A case of the domain; None if it asks for more log-probabilities than there are tokens."""
    return None if top_n > V else Case(V=V, top_n=top_n, **values)


SPEC = OpSpec(
    name="sample",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("tokens", "logprob_ids", "logprobs"),
    output_dtypes={"logprobs": torch.float32},
    compare=compare,
    compare_own_stream=compare_own_stream,
    planted=planted,
    optional={"penalties": False, "allowed": False, "top_n": 0, "sigma": 3.0},
    cases={
        "smoke": (_case(4, 300, 0.8, 40, 0.9, 0.02), _case(2, 257, 0.0), _case(3, 128)),
        "edge": (
            _case(2, 1),
            _case(3, 2, 1.0, 1),
            _case(2, 7, 0.5, 3, 0.5),
            _case(2, 1023, 1.0, 0, 0.9),
            _case(2, 1024, 1.0, 1024),
            _case(2, 1025, 1.3, 5000, 0.3),
            _case(2, 2049, 0.01, 0, 0.999),
            _case(2, 3000, 100.0, 0, 1.0, 0.5),
            _case(2, 500, 1.0, 0, 1.0, 1.0),
            _case(3, 700, 0.9, 30, 0.8, 0.01).but(penalties=True, allowed=True, top_n=5),
            _case(3, 65, 0.0).but(penalties=True, top_n=2),
            _case(2, 96, 1.0).but(allowed=True),
        ),
        "smollm2_135m": _model(49152),
        "qwen3_0_6b": _model(151936),
        "llama3_8b": _model(128256),
    },
    domain=Domain(
        {
            "B": Sizes(1, 300),
            "V": Sizes(1, 150_000),
            "temperature": (1.0, 0.0, 0.3, 2.0),
            "top_k": (0, 1, 40, 1024),
            "top_p": (1.0, 0.9, 0.3),
            "min_p": (0.0, 0.05, 0.5),
            # Mostly off: a kernel may lack an option, and then refuses a case with it.
            "penalties": (*[False] * 4, True),
            "allowed": (*[False] * 4, True),
            "top_n": (*[0] * 6, 1, 20),
            "sigma": (3.0, 1.0),
        },
        _drawn,
    ),
)
