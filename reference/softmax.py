"""softmax: divides exp(x) by its sum along the last axis."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, Contract, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.rows import ACCUMULATION_FACTOR, of_size, planted_columns
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Returns exp(x - max) / sum(exp(x - max)) in fp64. x: (T, H), with a finite value in each row; returns (T, H)."""
    return torch.softmax(x.double(), dim=-1)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal values of standard deviation 3, close to the logits of a language model."""
    T, H = int(case["T"]), int(case["H"])
    return {"x": randn(T, H, dtype=scheme.activation, device=device, seed=seed, scale=3.0)}


def cost(args: Arguments) -> Cost:
    """Returns the cost: one read, one write, an exp and four FLOPs per element, and a reciprocal per row."""
    T, H = args.x.shape
    return Cost(nbytes(args.x), nbytes(args.x), vector_flops=4.0 * T * H, sfu_ops=float(T * H + T))


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance:

        (c * sqrt(H) + 8 + 4 * gap) * u_32 * |ref|  +  u_out * |ref|  +  2**-126  +  half a subnormal

    c = 4, gap = max - x. u_32 and u_out are the unit roundoffs of fp32 and of the output. The exp rounds its argument
    gap * log2(e), which costs a relative error of gap u_32. 4 gap also covers these errors in the sum. A result below
    2**-126 may become 0."""
    x = inputs["x"].double()
    top_gap = x.amax(-1, keepdim=True) - x if x.shape[-1] else x
    relative_error = (ACCUMULATION_FACTOR * x.shape[-1] ** 0.5 + 8.0 + 4.0 * top_gap.clamp(max=1000.0)) * FP32_ROUNDOFF
    subnormal_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    return ((relative_error + scheme.unit_roundoff) * oracle[0] + 2.0**-126 + subnormal_error,)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one column, at a tile edge in a row, has most of the sum. Also yields rows that
    overflow unless the maximum is subtracted. Also yields runs of -inf longer than any tile, and the largest
    magnitudes."""
    H = int(case["H"])
    for column in planted_columns(H):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["x"][:, column] = 25.0
        yield f"column={column}", inputs
    for value_offset in (-1000.0, 1000.0):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["x"] += value_offset
        yield f"all about {value_offset:g}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["x"][:, 1::2] = -math.inf
    yield "every second -inf", inputs
    for values_label, finite_slice in (
        ("first half", slice(H // 2, None)),
        ("last half", slice(None, (H + 1) // 2)),
        ("all but the first", slice(None, 1)),
        ("all but the last", slice(max(H - 1, 0), None)),
    ):
        inputs = make_inputs(case, scheme, device, seed)
        x = torch.full_like(inputs["x"], -math.inf)
        x[:, finite_slice] = inputs["x"][:, finite_slice]
        yield f"{values_label} -inf", {"x": x}
    inputs = make_inputs(case, scheme, device, seed)
    yield "magnitudes of 60,000", {"x": of_size(inputs["x"], 6e4)}


def _cases(*shapes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case(T=T, H=H) for T, H in shapes)


def _without_maximum(of: Arguments) -> torch.Tensor:
    weights: torch.Tensor = of.x.float().exp()
    return weights / weights.sum(1, keepdim=True)


CONTRACT = Contract({"x": Argument("T H", FLOATS)}, {"out": Result("T H", "x")})
SPEC = OpSpec(
    name="softmax",
    reference=softmax,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
    cases={
        "smoke": _cases((8, 64)),
        "edge": _cases((1, 2), (1, 576), (3, 33), (5, 1025), (17, 128), (0, 64), (3, 111), (2, 65537)),
        # Scores of a query over its keys, and probabilities over the vocabulary.
        "smollm2_135m": _cases((9, 2048), (16, 49152)),
        "qwen3_0_6b": _cases((16, 4096), (16, 151936)),
        "llama3_8b": _cases((1, 4096), (32, 128256), (2048, 4096)),
    },
    in_place={"out": "x"},
    wrong={
        "the maximum is not taken off": _without_maximum,
        "a padded column of zeros is in the sum": lambda of: torch.nn.functional.pad(of.x.double(), (0, 1)).softmax(1)[
            :, :-1
        ],
        "the last column is left out of the sum": lambda of: softmax(of.x) / softmax(of.x)[:, :-1].sum(1, keepdim=True),
    },
    tolerance=tolerance,
    planted=planted,
    domain=Domain({"T": Sizes(1, 131_000, empty=True), "H": Sizes(1, 300_000, model="vocab")}, Case),
)
