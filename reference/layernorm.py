"""layernorm: computes (x - mean) / sqrt(variance + eps) * weight + bias over the last axis.

Ba, Kiros and Hinton, "Layer Normalization", 2016.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, Contract, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.rows import ACCUMULATION_FACTOR, magnitudes, of_size, planted_columns
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def layernorm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Returns the layer norm in fp64, with mean and variance over H. x: (T, H); weight, bias: (H,); returns (T, H)."""
    check_shape("weight", weight, x.shape[-1])
    if bias is not None:
        check_shape("bias", bias, x.shape[-1])
    fp64_x = x.double()
    centred_x = fp64_x - fp64_x.mean(dim=-1, keepdim=True)
    weighted_x = centred_x / (centred_x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()
    return weighted_x if bias is None else weighted_x + bias.double()


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal `x` with mean 0.5, weights with mean 1 and biases with mean 0."""
    T, H = int(case["T"]), int(case["H"])
    x = randn(T, H, dtype=scheme.activation, device=device, seed=seed, mean=0.5)
    weight = randn(H, dtype=scheme.weight, device=device, seed=seed + 1, scale=0.5, mean=1.0)
    bias = randn(H, dtype=scheme.weight, device=device, seed=seed + 2) if case["bias"] else None
    return {"x": x, "weight": weight, "bias": bias, "eps": float(case["eps"])}


def cost(args: Arguments) -> Cost:
    """Returns the cost: one read per operand, one write, eight FLOPs per element, and one rsqrt per row."""
    T, H = args.x.shape
    return Cost(nbytes(args.x, args.weight, args.bias), nbytes(args.x), vector_flops=8.0 * T * H, sfu_ops=float(T))


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance:

        ((c / 2 * sqrt(H) + 8) * u_32 + 2 * u_out + (shift / std)**2) * |ref - bias|  +  u_out * |ref|
            +  |weight| * shift / std  +  subnormals
        shift = (c * sqrt(H) * mean(|x|) + 2 * |x|) * u_32

    c = 4. u_32 and u_out are the unit roundoffs of fp32 and of the output. shift is the error of x - mean. It changes
    the variance by shift^2. The variance formula mean(x^2) - mean^2 has the larger error mean^2 u_32, and fails if the
    mean is large."""
    x, weight = inputs["x"].double(), inputs["weight"].double()
    sqrt_H, u = x.shape[-1] ** 0.5, scheme.unit_roundoff
    bias = 0.0 if inputs["bias"] is None else inputs["bias"].double()
    variance = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    std = (variance + inputs["eps"]).sqrt()
    x_error = (ACCUMULATION_FACTOR * sqrt_H * x.abs().mean(-1, keepdim=True) + 2.0 * x.abs()) * FP32_ROUNDOFF
    scaled_ref = (oracle[0] - bias).abs()
    relative_error = (ACCUMULATION_FACTOR / 2 * sqrt_H + 8.0) * FP32_ROUNDOFF + 2.0 * u + (x_error / std).square()
    min_error = torch.finfo(scheme.output).smallest_normal * u
    return (relative_error * scaled_ref + u * oracle[0].abs() + weight.abs() * (x_error / std + min_error) + min_error,)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one column, at a tile edge, has most of the variance. Then yields a large mean."""
    H = int(case["H"])
    for column in planted_columns(H):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["x"][:, column] = 10.0 * max(H, 1) ** 0.5
        yield f"column={column}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["x"] += 1000.0
    yield "mean of 1000", inputs
    inputs = make_inputs(case, scheme, device, seed)
    for magnitude_label, magnitude in magnitudes(scheme.activation, H):
        yield magnitude_label, {**inputs, "x": of_size(inputs["x"], magnitude)}


def _cases(*shapes: tuple[int, int], bias: bool = True) -> tuple[Case, ...]:
    return tuple(Case(T=T, H=H, bias=bias, eps=1e-5) for T, H in shapes)


def _of_squares(of: Arguments) -> torch.Tensor:
    """Imitates a faulty kernel that computes the variance in fp32 as mean(x^2) - mean(x)^2. Returns its result."""
    x = of.x.float()
    variance = x.square().mean(1, keepdim=True) - x.mean(1, keepdim=True).square()
    weighted_x: torch.Tensor = (x - x.mean(1, keepdim=True)) * (variance + of.eps).rsqrt() * of.weight
    return weighted_x if of.bias is None else weighted_x + of.bias


CONTRACT = Contract(
    {"x": Argument("T H", FLOATS), "weight": Argument("H", "x"), "bias": Argument("H", "x", optional=True)},
    {"out": Result("T H", "x")},
)
SPEC = OpSpec(
    name="layernorm",
    reference=layernorm,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
    cases={
        "smoke": _cases((8, 64)),
        "edge": (
            *_cases((1, 2), (3, 33), (5, 1025), (0, 64), (2, 65537)),
            *_cases((1, 576), (17, 128), (3, 111), bias=False),
        ),
        "smollm2_135m": _cases((1, 576), (512, 576)),
        "qwen3_0_6b": _cases((1, 1024), (512, 1024)),
        "llama3_8b": _cases((1, 4096), (16, 4096), (2048, 4096)),
    },
    in_place={"out": "x"},
    wrong={
        "eps is left out": lambda of: {"eps": 0.0},
        "the variance is the mean of squares less the squared mean": _of_squares,
        "the variance is over H - 1": lambda of: {"weight": of.weight.double() * (1 - 1 / of.x.shape[1]) ** 0.5},
    },
    tolerance=tolerance,
    planted=planted,
    domain=Domain(
        {
            **{"T": Sizes(1, 131_000, empty=True), "H": Sizes(1, 70_000, model="hidden head_dim")},
            **{"bias": (True, False), "eps": (1e-5, 0.01)},
        },
        Case,
    ),
)
