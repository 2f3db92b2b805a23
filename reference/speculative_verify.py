"""Verifies draft tokens by rejection sampling against the target's probabilities (Leviathan et al., "Fast inference
from transformers via speculative decoding", ICML 2023; Chen et al., arXiv 2302.01318).

p is the target's distribution, q is the draft's, and u is a uniform random number. Draft token x is accepted if u <
p(x) / q(x). A draw from max(p - q, 0) replaces the first rejected token. If all drafts are accepted, one more token is
drawn from the target. So every token follows the target's distribution.

For draft i, u is the first word of the Philox counter (position + i, 0, 1, 0). The replacement of draft i is drawn with
`philox.race` at position + i in stream 2. Stream 0 would make it depend on the draft, because `sample` may have drawn
the draft from stream 0. The token after the last draft comes from stream 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from rooflab.reference.compare import ErrorStats
from rooflab.reference.contract import Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.philox import philox, race
from rooflab.reference.sample_law import SCORE_ULPS
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes
from rooflab.roofline.model import Cost

RECOVERY_STREAM = 2
"""The stream of the token that replaces a draft."""


def uniform(seed: int, position: int) -> float:
    """Returns the random number u at `position`: min(fp32(x) * 2**-32 + 2**-33, 1 - 2**-24), x a Philox word."""
    philox_counter = np.array([position & 0xFFFFFFFF, 0, 1, 0], dtype=np.uint64)
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint64)
    random_word = philox(philox_counter, key)[0].astype(np.uint32).astype(np.float32)
    return float(np.minimum(random_word * np.float32(2.0**-32) + np.float32(2.0**-33), np.float32(1 - 2.0**-24)))


def _laws(row: int, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the probabilities of the target model (K + 1, V) and of the draft model (K, V), in fp64. Without draft
    probabilities, each draft token has probability 1."""
    p = inputs["target_probs"][row].cpu().double()
    if inputs.get("draft_probs") is not None:
        return p, inputs["draft_probs"][row].cpu().double()
    q = torch.zeros_like(p[:-1])
    tokens = inputs["draft_tokens"][row].cpu()
    used_mask = torch.arange(len(tokens)) < int(inputs["num_drafts"][row])
    q[used_mask] = torch.nn.functional.one_hot(tokens[used_mask], p.shape[1]).double()
    return p, q


def _weights(i: int, p: torch.Tensor, q: torch.Tensor, drafts: int) -> torch.Tensor:
    """Returns the weights (V,) for drawing the token after the first `i` draft tokens, which are accepted. `drafts` is
    the number of draft tokens. `p` and `q` are the probabilities of the target and of the draft.

    If draft token `i` is rejected, the weights are max(p - q, 0). After the last draft token, they are p."""
    weights = (p[i] - q[i]).clamp(min=0) if i < drafts else p[i]
    return weights if bool(weights.any()) else p[i]  # p = q up to rounding: nothing is left to draw from


def reference(
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    num_drafts: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    draft_probs: torch.Tensor | None = None,
) -> Outputs:
    """Returns the accepted tokens and one more token, (B, K + 1) int64, padded with -1, and the number of accepted
    tokens, (B,) int32.

    draft_tokens: (B, K) int64; num_drafts: (B,) int32, the number of drafts in each row. target_probs: (B, K + 1, V)
    fp32, the distribution after i drafts. draft_probs: (B, K, V) fp32; None means that each draft token had probability
    1. seed: (B,) int64. position: (B,) int64, of the first draft token."""
    arguments: Inputs = {"draft_tokens": draft_tokens, "target_probs": target_probs, "num_drafts": num_drafts}
    arguments |= {"seed": seed, "position": position, "draft_probs": draft_probs}
    values_fit(arguments, CONTRACT.check(arguments))
    B, K = draft_tokens.shape
    inputs: Inputs = {"draft_tokens": draft_tokens, "target_probs": target_probs, "num_drafts": num_drafts}
    inputs["draft_probs"] = draft_probs
    tokens = torch.full((B, K + 1), -1, dtype=torch.int64)
    accepted_counts = torch.zeros(B, dtype=torch.int32)
    for b, (draft_count, s, n) in enumerate(zip(num_drafts.tolist(), seed.tolist(), position.tolist(), strict=True)):
        p, q = _laws(b, inputs)
        i = 0
        while i < draft_count:
            draft_token = int(draft_tokens[b, i])
            if not uniform(s, n + i) * float(q[i, draft_token]) < float(p[i, draft_token]):
                break
            tokens[b, i] = draft_token
            i += 1
        scores = _weights(i, p, q, draft_count).log() - race(
            s, n + i, p.shape[1], RECOVERY_STREAM if i < draft_count else 0
        )
        tokens[b, i], accepted_counts[b] = int(scores.argmax()), i
    return tokens.to(draft_tokens.device), accepted_counts.to(draft_tokens.device)


def some_tokens(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if the vocabulary is empty."""
    if not dims["V"]:
        raise ValueError("target_probs: expected at least one token, got 0")


def values_fit(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` on a wrong number of drafts, an unknown token, or invalid probabilities that are used."""
    K, V = dims["K"], dims["V"]
    draft_tokens, num_drafts = arguments["draft_tokens"], arguments["num_drafts"]
    draft_probs = arguments.get("draft_probs")
    used_mask = torch.arange(K, device=num_drafts.device) < num_drafts[:, None]
    wrong_rows = {
        "num_drafts": ((num_drafts < 0) | (num_drafts > K), f"0 to {K}"),
        "draft_tokens": ((used_mask & ((draft_tokens < 0) | (draft_tokens >= V))).any(-1), f"0 to {V - 1}"),
        "target_probs": (~_is_law(arguments["target_probs"]).all(-1), "finite values >= 0, and one > 0"),
    }
    if draft_probs is not None:
        wrong_rows["draft_probs"] = ((used_mask & ~_is_law(draft_probs)).any(-1), "finite values >= 0, and one > 0")
    for input_name, (rows, rule_text) in wrong_rows.items():
        if bool(rows.any()):
            raise ValueError(f"{input_name}: expected {rule_text}, got another value in row {int(rows.int().argmax())}")


def _is_law(probs: torch.Tensor) -> torch.Tensor:
    row_min, row_max = probs.aminmax(dim=-1)  # both are NaN if a value is NaN
    return (row_min >= 0) & (row_max > 0) & row_max.isfinite()


def compare(actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
    """Checks that tokens and numbers of accepted tokens equal the reference's. A row may differ if fp32 rounding may
    have changed a decision.

    Rounding may change an acceptance if |u * q - p| < 4 * 2**-24 * (u * q + p). It may change a draw if the drawn
    token's score is within the two errors of the best score. The error of a score is `SCORE_ULPS` * 2**-24 * (|log
    weight| + |log E| + 1), with E exponential noise."""
    output_names, errors = ("tokens", "num_accepted"), []
    for name, result, ref_out in zip(output_names, actual, oracle, strict=True):
        if result.shape != ref_out.shape or result.dtype != ref_out.dtype:
            note = f"expected {tuple(ref_out.shape)} {ref_out.dtype}, got {tuple(result.shape)} {result.dtype}"
            errors.append(ErrorStats(name, False, math.nan, math.inf, ref_out.numel(), ref_out.numel(), note=note))
    if errors:
        return errors + [ErrorStats(name, True, 0.0, 0.0, 0, 0) for name in output_names[len(errors) :]]
    wrong_row_ids = []
    for b, (tokens, accepted_count) in enumerate(zip(actual[0].tolist(), actual[1].tolist(), strict=True)):
        outputs_equal = tokens == oracle[0][b].tolist() and accepted_count == int(oracle[1][b])
        if not outputs_equal and not _excused(tokens, accepted_count, inputs, b):
            wrong_row_ids.append(b)
    error = math.inf if wrong_row_ids else 0.0
    return [
        ErrorStats(name, not wrong_row_ids, error, error, len(wrong_row_ids), len(oracle[1]), tuple(wrong_row_ids[:1]))
        for name in output_names
    ]


def _excused(tokens: list[int], accepted: int, inputs: Inputs, b: int) -> bool:
    """Returns True if fp32 rounding may explain that a row's tokens differ from the reference's."""
    p, q = _laws(b, inputs)
    draft_count, s, n = (int(inputs[input_name][b]) for input_name in ("num_drafts", "seed", "position"))
    if not 0 <= accepted <= draft_count or any(token != -1 for token in tokens[accepted + 1 :]):
        return False
    for i in range(min(accepted + 1, draft_count)):
        draft_token = int(inputs["draft_tokens"][b, i])
        u_q, p_x = uniform(s, n + i) * float(q[i, draft_token]), float(p[i, draft_token])
        is_doubtful = abs(u_q - p_x) < 4 * FP32_ROUNDOFF * (u_q + p_x)  # two zeros decide alike in any precision
        if not is_doubtful and (u_q < p_x) != (i < accepted):
            return False
        if i < accepted and tokens[i] != draft_token:
            return False
    drawn_token = tokens[accepted]
    if not 0 <= drawn_token < p.shape[1]:
        return False
    noise_stream = RECOVERY_STREAM if accepted < draft_count else 0
    log_weights, noise = _weights(accepted, p, q, draft_count).log(), race(s, n + accepted, p.shape[1], noise_stream)
    scores = log_weights - noise
    best_token = int(scores.argmax())
    max_error = sum(
        SCORE_ULPS * FP32_ROUNDOFF * float(log_weights[i].abs() + noise[i].abs() + 1) for i in (drawn_token, best_token)
    )
    return (
        math.isfinite(float(log_weights[drawn_token])) and float(scores[best_token] - scores[drawn_token]) <= max_error
    )


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes drafts that are close to the target: about 2 of 3 are accepted. `ngram` drafts have no probabilities."""
    B, K, V = (int(case[name]) for name in ("B", "K", "V"))
    is_meta = torch.device(device).type == "meta"
    real_device = torch.device("cpu" if is_meta else device)
    generator = torch.Generator().manual_seed(seed)
    small_tensors = {
        "num_drafts": torch.randint(0, K + 1, (B,), generator=generator, dtype=torch.int32),
        "seed": torch.randint(-(2**62), 2**62, (B,), generator=generator),
        "position": torch.randint(0, 2**20, (B,), generator=generator),
    }
    if is_meta:
        tokens = torch.zeros(B, K, dtype=torch.int64)
        p, q = torch.empty(B, K + 1, V, device=device), torch.empty(B, K, V, device=device)
    else:
        logits = 2 * torch.randn(B, K + 1, V, generator=generator)
        p, q = logits.softmax(-1), (logits[:, :K] + 0.7 * torch.randn(B, K, V, generator=generator)).softmax(-1)
        tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, K)
        p, q = p.to(real_device), q.to(real_device)
    inputs: Inputs = {"draft_tokens": tokens.to(real_device), "target_probs": p}
    inputs |= {name: input_value.to(real_device) for name, input_value in small_tensors.items()}
    return inputs if case.get("ngram") else inputs | {"draft_probs": q}


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: padding after the drafts, a draft distribution equal to the target's, and weights for
    which max(p - q, 0) is 0. Also yields a target that is certain of one token, and a draft that is always wrong."""
    inputs = make_inputs(case, scheme, device, seed)
    unused_mask = torch.arange(int(case["K"]), device=inputs["num_drafts"].device) >= inputs["num_drafts"][:, None]
    padded_inputs = {"draft_tokens": inputs["draft_tokens"].masked_fill(unused_mask, -1)}
    if "draft_probs" in inputs:
        padded_inputs["draft_probs"] = inputs["draft_probs"].masked_fill(unused_mask[..., None], math.nan)
    yield "uneven rows: drafts behind the last are padding", inputs | padded_inputs
    B, K, V = int(case["B"]), int(case["K"]), int(case["V"])
    inputs["num_drafts"] = torch.full_like(inputs["num_drafts"], K)
    if "draft_probs" in inputs:
        yield "identical draft", inputs | {"draft_probs": inputs["target_probs"][:, :K].clone()}
        low_probs = inputs["target_probs"].clone()
        low_probs[:, :K] = 0.125 * inputs["draft_probs"]
        yield "values: an eighth of the draft's weights, so that nothing is left", inputs | {"target_probs": low_probs}
    if "draft_probs" in inputs and V > 1:
        draft_ids = inputs["draft_tokens"][..., None]
        target_probs, new_draft = inputs["target_probs"].clone(), inputs["draft_probs"].scatter(2, draft_ids, 0)
        target_probs[:, :K].scatter_(2, draft_ids, 0)
        yield "values: drafts that both laws give 0", inputs | {"target_probs": target_probs, "draft_probs": new_draft}
    for agreeing_drafts in sorted({0, K // 2, K}):  # the target is certain, and agrees with that many drafts
        target_tokens = torch.full((B, K + 1), V - 1, device=inputs["draft_tokens"].device)
        target_tokens[:, :agreeing_drafts] = inputs["draft_tokens"][:, :agreeing_drafts]
        yield f"certain target, {agreeing_drafts} agree", inputs | {"target_probs": _one_hot(target_tokens, V)}
    if V > 1:
        wrong_tokens = torch.full_like(inputs["draft_tokens"], V - 1)
        target_probs = _one_hot(torch.zeros(B, K + 1, dtype=torch.int64, device=wrong_tokens.device), V)
        new_draft = {"draft_probs": _one_hot(wrong_tokens, V)} if "draft_probs" in inputs else {}
        yield "never right", inputs | {"draft_tokens": wrong_tokens, "target_probs": target_probs} | new_draft


def _one_hot(tokens: torch.Tensor, V: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, V).float()


def cost(args: Arguments) -> Cost:
    """Returns the cost. A row reads one distribution of the target for the draw, and two probabilities per draft. The
    draft's distribution is not counted. It is read only after a rejection, and the number of rejections is unknown."""
    B, V = args.target_probs.shape[0], args.target_probs.shape[2]
    K = args.draft_tokens.shape[1]
    return Cost(
        read_bytes=4 * B * V + nbytes(args.draft_tokens, args.num_drafts, args.seed, args.position),
        write_bytes=8 * B * (K + 1) + 4 * B,
        vector_flops=float(B * V),
        sfu_ops=float(2 * B),
    )


def _case(B: int, K: int, V: int) -> Case:
    return Case(B=B, K=K, V=V)


def _model(V: int) -> tuple[Case, ...]:
    return (_case(1, 4, V), _case(16, 4, V))


PROBABILITY_DTYPES, INT64_DTYPES = (torch.float32,), (torch.int64,)
CONTRACT = Contract(
    {
        "draft_tokens": Argument("B K", INT64_DTYPES, "contiguous"),
        "target_probs": Argument("B K+1 V", PROBABILITY_DTYPES, "contiguous"),
        "num_drafts": Argument("B", (torch.int32,)),
        **{"seed": Argument("B", INT64_DTYPES), "position": Argument("B", INT64_DTYPES)},
        "draft_probs": Argument("B K V", PROBABILITY_DTYPES, "contiguous", optional=True),
    },
    {
        "tokens": Result("B K+1", torch.int64, layout="contiguous"),
        "num_accepted": Result("B", torch.int32, layout="contiguous"),
    },
    rules=some_tokens,
    bounds=values_fit,
    scheme=lambda arguments: "fp32",
)


def _counted_one_less(of: Arguments) -> Outputs:
    tokens, accepted_counts = reference(**vars(of))
    return tokens, (accepted_counts - 1).clamp(min=0)


SPEC = OpSpec(
    name="speculative_verify",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("tokens", "num_accepted"),
    wrong={
        "accepts no draft": lambda of: {"num_drafts": of.num_drafts * 0},
        "the draft's law is halved": lambda of: {"draft_probs": None if of.draft_probs is None else of.draft_probs / 2},
        "another stream": lambda of: {"seed": of.seed + 1},
        "the next position": lambda of: {"position": of.position + 1},
        "accepted drafts are one less": _counted_one_less,
    },
    compare=compare,
    planted=planted,
    schemes=("fp32",),
    optional={"ngram": False},
    no_library="no speculative decoding",
    cases={
        "smoke": (_case(6, 3, 300), _case(4, 2, 129).but(ngram=True)),
        "edge": (_case(2, 1, 1), _case(3, 5, 2), _case(3, 1, 1025), _case(2, 8, 2048).but(ngram=True)),
        "smollm2_135m": _model(49152),
        "qwen3_0_6b": _model(151936),
        "llama3_8b": _model(128256),
    },
    domain=Domain(
        {
            **{"B": Sizes(1, 40, empty=True), "K": Sizes(1, 17, empty=True)},
            **{"V": Sizes(1, 300_000, model="vocab"), "ngram": (False, True)},
        },
        Case,
    ),
)
