"""Draws one token per row of logits, with penalties, temperature, top-k, top-p and min-p. Draws are reproducible
(Gumbel-max).

First, a row's logits may be edited by a bias, by penalties for earlier tokens, and by a mask of allowed tokens. The
token is then argmax(log p - log E), which is a draw from p if E is exponential noise. E depends only on seed, position
and token (`philox.race`). So every correct kernel draws the same token, and other rows of the batch do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, Contract, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.pages import offsets_of
from rooflab.reference.philox import race
from rooflab.reference.sample_law import LAW_DRAWS, compare, compare_own_stream, edited, support
from rooflab.reference.sample_rules import Edits, edits_of, finite_rows, settings_fit, values_fit
from rooflab.reference.spec import Arguments, Case, Inputs, OpSpec, Outputs, Scalar, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


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
    """Returns one token id per row, (B,) int64: the argmax of logits / temperature - log E over the tokens that may be
    drawn. E is exponential noise.

    logits: (B, V) of any float dtype, finite or -inf; temperature: (B,) fp32, 0 = the highest logit; top_k: (B,) int32,
    0 = off; top_p: (B,) fp32 in (0, 1], 1 = off; min_p: (B,) fp32, 0 = off; seed, position: (B,) int64, only the low 32
    bits of a position count. Of equal scores, the lowest index wins.

    Logits are edited first. edit_offsets: (B + 1,) int32; edit_ids, edit_counts: (N,) int32; edit_bias: (N,) fp32,
    which may be -inf. Row b edits the tokens edit_ids[edit_offsets[b]:edit_offsets[b + 1]], each token once. An edit
    computes x = logit + bias. With a count >= 0, a positive x is divided by the repetition penalty, and any other x is
    multiplied by it (Keskar et al., "CTRL", 2019). With a count > 0, frequency_penalty * count + presence_penalty is
    subtracted. The count is 0 for a token that is only in the prompt, and -1 for a token that has only a bias. The
    penalties are (B,) fp32. allowed: (B, ceil(V / 32)) int32, one bit per token; a token with bit 0 is never drawn.

    With `top_n` also returns ids (B, 1 + top_n) int64 and log-probabilities of the same shape. Column 0 is the drawn
    token, and the other columns are the most likely tokens. Log-probabilities use the logits before edits and
    temperature. Raises `ValueError` if a row has a NaN, a +inf or no finite logit after the edits. A GPU kernel draws
    any id in [0, V) for such a row."""
    penalties = repetition_penalty, presence_penalty, frequency_penalty
    logit_edits = Edits(*penalties, edit_offsets, edit_ids, edit_counts, edit_bias, allowed)
    arguments: Inputs = {"logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    arguments |= {"seed": seed, "position": position, **logit_edits.tensors, "top_n": top_n}
    values_fit(arguments, CONTRACT.check(arguments))
    edited_rows = edited(logits, **logit_edits.tensors)
    setting_rows = zip(*(t.tolist() for t in (temperature, top_k, top_p, min_p, seed, position)), strict=True)
    tokens = []
    for b, (row, (t, k, p, min_prob, s, n)) in enumerate(zip(edited_rows, setting_rows, strict=True)):
        if not math.isfinite(row.max().item()):  # torch's max is NaN if the row has a NaN
            raise ValueError(f"logits: row {b}: expected a finite largest value, got {row.max().item()}")
        if t == 0:
            tokens.append(int(row.argmax()))
            continue
        candidates = support(row, t, k, p, min_prob)
        tokens.append(int((candidates.scores - race(s, n, len(row))).masked_fill(~candidates.kept, -math.inf).argmax()))
    token_ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    if top_n is None:
        return token_ids
    likely_tokens = torch.sort(logits.double(), dim=-1, descending=True, stable=True)[1][:, :top_n]
    logprob_ids = torch.cat([token_ids[:, None], likely_tokens], dim=1)
    return token_ids, logprob_ids, logits.double().log_softmax(-1).gather(1, logprob_ids)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal logits with standard deviation `sigma` (default 3, as in language models). All rows have the same
    settings. With `penalties`, each row gets penalties, and a bias and a count for up to 24 tokens. With `allowed`,
    about half of the tokens are allowed."""
    B, V = int(case["B"]), int(case["V"])
    sigma, top_n = float(case.get("sigma", 3.0)), int(case.get("top_n", 0))
    logits = randn(B, V, dtype=scheme.activation, device=device, seed=seed, scale=sigma)
    row_settings = (float(case["temperature"]), int(case["top_k"]), float(case["top_p"]), float(case["min_p"]))
    inputs = {"logits": logits} | settings([row_settings] * B, device, seed)
    if case.get("penalties"):
        inputs |= _edits(B, V, device, seed)
    if case.get("allowed"):
        generator = torch.Generator().manual_seed(seed)
        allowed_words = torch.randint(-(2**31), 2**31, (B, -(-V // 32)), generator=generator, dtype=torch.int32)
        allowed_words[:, 0] |= 1  # token 0, which no edit removes: some token can always be drawn
        inputs["allowed"] = allowed_words.to(_place(device))
    return inputs | ({"top_n": top_n} if top_n else {})


def _place(device: torch.device) -> torch.device:
    """Returns the device for small tensors. It is the CPU if `device` is `meta`, because the values of these tensors
    are needed."""
    return torch.device("cpu" if torch.device(device).type == "meta" else device)


def _edits(B: int, V: int, device: torch.device, seed: int) -> Inputs:
    """Makes random penalties for each row of logits, and edits of up to 24 tokens in each row. An edit is a bias, and
    the count of the token in the output so far. A count of -1 means that no penalty applies. Some biases are -inf.
    Token 0 has no edit."""
    generator = torch.Generator().manual_seed(seed)
    max_edits = min(V - 1, 24)
    edits_per_row = torch.randint(0, max_edits + 1, (B,), generator=generator)
    edits_per_row[:1], edits_per_row[3::4] = max_edits, 0
    N = int(edits_per_row.sum())
    edited_ids = [torch.randperm(V - 1, generator=generator)[:edit_count] + 1 for edit_count in edits_per_row.tolist()]
    all_biases = torch.randn(N, generator=generator)
    all_biases[torch.rand(N, generator=generator) < 0.2] = -math.inf
    inputs = {
        "repetition_penalty": torch.tensor([1.3, 0.7, 1.0])[torch.arange(B) % 3],
        "presence_penalty": torch.tensor([0.5, -0.5])[torch.arange(B) % 2],
        "frequency_penalty": torch.tensor([0.25, 0.0, 1.1, -0.3])[torch.arange(B) % 4],
        "edit_offsets": offsets_of(edits_per_row),
        "edit_ids": torch.cat(edited_ids).int() if B else torch.zeros(0, dtype=torch.int32),
        "edit_counts": torch.randint(-1, 4, (N,), generator=generator, dtype=torch.int32),
        "edit_bias": all_biases,
    }
    return {name: input_tensor.to(_place(device)) for name, input_tensor in inputs.items()}


def settings(rows: list[tuple[float, int, float, float]], device: torch.device, seed: int) -> Inputs:
    """Makes per-row tensors from `(temperature, top_k, top_p, min_p)` rows, with random seeds and positions."""
    generator = torch.Generator().manual_seed(seed)
    B = len(rows)
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    arg_names = ("temperature", "top_k", "top_p", "min_p")
    inputs = {
        name: torch.tensor(column, dtype=dtype) for name, column, dtype in zip(arg_names, columns, dtypes, strict=True)
    }
    inputs["seed"] = torch.randint(-(2**62), 2**62, (B,), generator=generator)
    inputs["position"] = torch.randint(0, 2**20, (B,), generator=generator)
    return {name: input_tensor.to(_place(device)) for name, input_tensor in inputs.items()}


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs with labels. In the first inputs, some logits are equal and the rest are -inf. They
    reveal a kernel that draws a token outside top_k, top_p or min_p. Later inputs have one large logit, or rows with
    different settings. In the last input, a penalty, a bias and a mask change the logits and decide the token."""
    V = int(case["V"])
    tie_cases = (
        ("top_k cuts ties by index", 4, (1.0, 3, 1.0, 0.0)),
        ("top_p reached exactly keeps no more", 4, (0.7, 0, 0.5, 0.0)),
        ("top_p keeps the token that crosses", 4, (1.0, 0, 0.5 + 2.0**-20, 0.0)),
        ("top_p after top_k, renormalised", 8, (1.0, 4, 0.25, 0.0)),
        ("top_k beyond 1,024 cuts ties by index", 2048, (1.0, 1500, 1.0, 0.0)),
        ("min_p keeps ties with the best", 2, (1.0, 0, 1.0, 1.0)),
        ("tiny top_p keeps one", 8, (2.0, 0, 1e-9, 0.0)),
        ("one token", 1, (1.5, 0, 0.9, 0.1)),
    )
    for (case_label, tie_count, row_setting), row_count in zip(tie_cases, (64, 8, 1, 8, 2, 1, 1, 1), strict=True):
        if tie_count > V or (row_setting[3] and not case["min_p"]):
            continue
        logits = torch.full((row_count, V), -math.inf)
        generator = torch.Generator().manual_seed(seed)
        for row in logits:
            row[torch.randperm(V, generator=generator)[:tie_count]] = 0.5
        inputs = {"logits": logits.to(device, scheme.activation)} | settings([row_setting] * row_count, device, seed)
        yield case_label, inputs
    for token in sorted({0, V // 2, V - 1}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["logits"][:, token] = 200.0
        yield f"token {token} dominates", inputs
    # Whole numbers tie often; among ties the lowest index wins.
    logits = randn(8, V, dtype=torch.float32, device=device, seed=seed, scale=3.0).round()
    setting_rows = [(0.7, 40, 1.0, 0.0), (1.0, 0, 0.9, 0.0)]
    setting_rows += [(0.0, 0, 1.0, 0.0), (1.3, 0, 1.0, 0.1)] if case["min_p"] else setting_rows
    row_settings = settings(setting_rows * 2, device, seed)
    yield "rows with settings of their own", {"logits": logits.to(scheme.activation)} | row_settings
    yield "all logits below -10,000", {"logits": (logits - 20_000).to(scheme.activation)} | row_settings
    empty_edits = {name: tensor[:0] for name, tensor in _edits(8, V, device, seed).items() if name.startswith("edit_")}
    empty_edits["edit_offsets"] = torch.zeros(9, dtype=torch.int32, device=_place(device))
    yield "empty: no edits", {"logits": logits.to(scheme.activation)} | row_settings | empty_edits
    yield (
        "a penalty, a bias and a mask decide",
        {"logits": logits.to(scheme.activation)} | row_settings | _deciding(8, V, device),
    )


def planted_own_stream(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields many rows of the same few tokens, in blocks with the same settings. The rows are the positions of two
    requests, side by side. So a kernel that ignores seeds or positions repeats its draws."""
    if case not in SPEC.cases["smoke"]:  # these draws are hardly others for another case, and take a second
        return
    V = min(int(case["V"]), 16)  # an emulator computes thousands of rows
    setting_rows = [(4.0, 0, 1.0, 0.0), (0.4, 0, 1.0, 0.0), (1.5, 4, 1.0, 0.0), (1.5, 0, 0.8, 0.0)]
    setting_rows += [(1.5, 0, 1.0, 0.1)] if case["min_p"] else []
    inputs = settings([row for row in setting_rows for _ in range(LAW_DRAWS)], device, seed)
    row_count = len(inputs["seed"])
    inputs["seed"] = inputs["seed"][:2].repeat(row_count // 2)
    inputs["position"] = torch.arange(row_count, device=inputs["position"].device) // 2
    logits = torch.full((V,), -math.inf)
    token_ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:6]
    logits[token_ids] = -torch.arange(float(len(token_ids)))
    yield "many draws of a few tokens", {"logits": logits.repeat(row_count, 1).to(device, scheme.activation)} | inputs


def _deciding(B: int, V: int, device: torch.device) -> Inputs:
    """Makes edits of the logits after which every row should draw token 0. Token 0 has a bias of 100. The last token
    has a bias of 150 and a penalty of 300. A mask forbids it in odd rows."""
    last_token = V - 1
    allowed_words = torch.full((B, -(-V // 32)), -1, dtype=torch.int32)
    allowed_words[1::2, last_token // 32] ^= torch.tensor(1).bitwise_left_shift(last_token % 32).int()
    row_edits = [(0, -1, 100.0)] + ([(last_token, 2, 150.0)] if last_token else [])
    edited_ids, token_counts, edit_biases = (torch.tensor(column).repeat(B) for column in zip(*row_edits, strict=True))
    edits = {
        "repetition_penalty": torch.full((B,), 1.5),
        "presence_penalty": torch.full((B,), 100.0),
        "frequency_penalty": torch.full((B,), 100.0),
        "edit_offsets": torch.arange(B + 1, dtype=torch.int32) * len(row_edits),
        "edit_ids": edited_ids.int(),
        "edit_counts": token_counts.int(),
        "edit_bias": edit_biases,
        "allowed": allowed_words if last_token else torch.full_like(allowed_words, -1),
        "top_n": min(3, V),
    }
    return {
        name: value.to(_place(device)) if isinstance(value, torch.Tensor) else value for name, value in edits.items()
    }


def cost(args: Arguments) -> Cost:
    """Returns the least bytes and operations of the op. Each logit is read once.

    A top_p below 1 needs an exponential for each token that top_k keeps. A random draw needs two logarithms for each
    candidate token. With top_p or min_p, the number of candidates depends on the logits, so one candidate is counted.
    Log-probabilities need an exponential for each token."""
    B, V = args.logits.shape
    sfu_ops = 0 if args.top_n is None else B * V
    settings = args.temperature, args.top_k, args.top_p, args.min_p
    for t, k, p, min_prob in zip(*(setting_tensor.tolist() for setting_tensor in settings), strict=True):
        if t > 0:
            kept_count = min(k, V) if k else V
            sfu_ops += (kept_count if p < 1 else 0) + 2 * (kept_count if p == 1 and min_prob == 0 else 1)
    return Cost(
        read_bytes=nbytes(args.logits, *settings, args.seed, args.position, *edits_of(vars(args)).tensors.values()),
        write_bytes=8 * B + (0 if args.top_n is None else 12 * B * (1 + args.top_n)),
        vector_flops=float(B * V),  # one comparison each; Philox is integer work
        sfu_ops=float(sfu_ops),
    )


def _case(B: int, V: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Case:
    return Case(B=B, V=V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def _model(V: int) -> tuple[Case, ...]:
    setting_rows = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 50, 0.95), (0.8, 0, 0.95))
    return tuple(_case(B, V, *setting_row) for B in (1, 16) for setting_row in setting_rows)


def _drawn(B: int, V: int, top_n: int, **values: Scalar) -> Case | None:
    """Makes a test case from random sizes. Returns None if `top_n` is above the vocabulary size V, or if B * V is above
    2**22."""
    return None if top_n > V or B * V > 2**22 else Case(B=B, V=V, top_n=top_n, **values)


FP32_DTYPES, INT64_DTYPES, INT32_DTYPES = (torch.float32,), (torch.int64,), (torch.int32,)
PENALTY_ARGUMENT = Argument("B", FP32_DTYPES, "contiguous", optional=True)
CONTRACT = Contract(
    {
        "logits": Argument("B V", FLOATS),
        "temperature": Argument("B", FP32_DTYPES),
        "top_k": Argument("B", (torch.int32,)),
        **{"top_p": Argument("B", FP32_DTYPES), "min_p": Argument("B", FP32_DTYPES)},
        **{"seed": Argument("B", INT64_DTYPES), "position": Argument("B", INT64_DTYPES)},
        **{f"{name}_penalty": PENALTY_ARGUMENT for name in ("repetition", "presence", "frequency")},
        "edit_offsets": Argument("B+1", INT32_DTYPES, optional=True),
        **{name: Argument("N", INT32_DTYPES, optional=True) for name in ("edit_ids", "edit_counts")},
        "edit_bias": Argument("N", FP32_DTYPES, optional=True),
        "allowed": Argument("B words", INT32_DTYPES, "contiguous", optional=True),
    },
    {
        "tokens": Result("B", torch.int64),
        "logprob_ids": Result("B top_n+1", torch.int64, "top_n", "contiguous"),
        "logprobs": Result("B top_n+1", torch.float32, "top_n", "contiguous"),
    },
    rules=settings_fit,
    bounds=values_fit,
    values=finite_rows,
)

SPEC = OpSpec(
    name="sample",
    reference=reference,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("tokens", "logprob_ids", "logprobs"),
    output_dtypes={"logprobs": torch.float32},
    wrong={
        "greedy": lambda of: {"temperature": of.temperature * 0},
        "another stream": lambda of: {"seed": of.seed + 1},
        "the next position": lambda of: {"position": of.position + 1},
        "top_k is one more": lambda of: {"top_k": of.top_k + (of.top_k > 0).int()},
        "top_p is left out": lambda of: {"top_p": torch.ones_like(of.top_p)},
        "the token that crosses top_p is dropped": lambda of: {"top_p": of.top_p / (1 + (of.top_p < 1))},
    },
    compare=compare,
    compare_own_stream=compare_own_stream,
    planted=planted,
    planted_own_stream=planted_own_stream,
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
            "B": Sizes(1, 300, empty=True),
            "V": Sizes(1, 300_000, model="vocab"),
            "temperature": (1.0, 0.0, 0.3, 2.0),
            "top_k": Sizes(0, 10_000),
            "top_p": (1.0, 0.9, 0.3),
            "min_p": (0.0, 0.05, 0.5),
            # The options are mostly off: a kernel without an option refuses a case with it.
            "penalties": (*[False] * 4, True),
            "allowed": (*[False] * 4, True),
            "top_n": (*[0] * 6, 1, 20),
            "sigma": (3.0, 1.0),
        },
        _drawn,
    ),
)
