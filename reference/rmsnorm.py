"""rmsnorm: computes y = x / sqrt(mean(x^2) + eps) * weight over the last axis.

Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, Contract
from rooflab.reference.domain import Axis, Domain, Sizes
from rooflab.reference.rows import (
    ACCUMULATION_FACTOR,
    magnitudes,
    of_size,
    planted_columns,
    quantized_limits,
    quantized_rows,
    quantizing,
    row_results,
    row_rules,
    row_scheme,
)
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
    quantize: str | None = None,
) -> Outputs:
    """Returns x / sqrt(mean(x^2) + eps) * (weight + weight_offset) in fp64.

    x: (T, H); weight: (H,); returns (T, H). weight_offset is 1 in Gemma. With `round_first`, x / rms is first rounded
    to the dtype of x, as in Llama in transformers. With `quantize` ("int8" or "fp8_e4m3"), returns codes (T, H) and
    scales (T,)."""
    return quantized_rows(normed(x.double(), weight, eps, weight_offset, x.dtype if round_first else None), quantize)


def normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, first: torch.dtype | None
) -> torch.Tensor:
    """Returns the RMSNorm of x (T, H) fp64. If `first` is a dtype, x / rms is first rounded to this dtype."""
    check_shape("weight", weight, x.shape[-1])
    mean_square = (x * x).mean(dim=-1, keepdim=True)  # (T, 1)
    normalized_x = x / (mean_square + eps).sqrt()
    return (normalized_x if first is None else normalized_x.to(first).double()) * (weight.double() + weight_offset)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes a normal random x. The weights are normal around 1, so that a kernel that ignores the weights fails."""
    T, H = int(case["T"]), int(case["H"])
    x = randn(T, H, dtype=scheme.activation, device=device, seed=seed)
    weight = randn(H, dtype=scheme.weight, device=device, seed=seed + 1, scale=0.5, mean=1.0)
    return {"x": x, "weight": weight, "eps": float(case["eps"]), **options(case, scheme)}


def options(case: Case, scheme: Scheme) -> Inputs:
    """Returns the optional arguments of a call: the case's norm options, and `quantize` if the output has 8 bits."""
    case_options = {
        option: case[option] for option in OPTION_DEFAULTS if option in case and case[option] != OPTION_DEFAULTS[option]
    }
    return {**case_options, **quantizing(scheme)}


def cost(args: Arguments) -> Cost:
    """Returns the cost: x and weight are read, the result is written. Four FLOPs per value, one rsqrt per row."""
    T, H = args.x.shape
    written_bytes = nbytes(args.x) if args.quantize is None else T * H + 4 * T
    return Cost(
        read_bytes=nbytes(args.x, args.weight), write_bytes=written_bytes, vector_flops=4.0 * T * H, sfu_ops=float(T)
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of each output value:

        (c / 2 * sqrt(H) + 4) * u_32 * |ref|  +  n * u * |ref|  +  subnormals

    u_32 and u are the unit roundoffs of fp32 and of x's dtype. c = 4 allows an unlucky random walk. The sum of H
    squares has a relative error of about sqrt(H) u_32, and the root halves this error. The other operations add one to
    two u_32 each.

    n counts roundings to x's dtype. It is 2, because Llama in transformers rounds x / rms, and then the product with
    the weight. With `round_first`, n is 3, because the reference rounds x / rms too. With an offset and no
    `round_first`, n is 1: Gemma in transformers rounds only the result, and the fault to round weight + offset costs u.

    A quantised output is not rounded to x's dtype, so n is 0, or 2 with `round_first`. `quantized_limits` then computes
    the tolerances of the codes and scales.
    """
    quant_format, dtype = inputs.get("quantize"), scheme.activation
    first_roundings, last_roundings = (2.0 if inputs.get("round_first") else 0.0), (0.0 if quant_format else 1.0)
    usual_roundings = (1.0 if inputs.get("weight_offset") else 2.0) * last_roundings
    rounding_count = max(first_roundings + last_roundings, usual_roundings)
    u = torch.finfo(dtype).eps / 2
    relative_error = (ACCUMULATION_FACTOR / 2 * inputs["x"].shape[-1] ** 0.5 + 4.0) * FP32_ROUNDOFF + rounding_count * u
    subnormal_error = torch.finfo(dtype).smallest_normal * u
    weight = inputs["weight"].double() + inputs.get("weight_offset", 0.0)
    unscaled_out = oracle[0] if quant_format is None else oracle[0] * oracle[1][:, None]
    out_error = relative_error * unscaled_out.abs() + subnormal_error * (1.0 + weight.abs())
    return (out_error,) if quant_format is None else quantized_limits(oracle, out_error, quant_format)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one column, at a tile edge in H, makes up most of the mean square. Also yields a mean
    square near eps, and values with squares that overflow or underflow the dtype."""
    H = int(case["H"])
    for column in planted_columns(H):
        inputs = make_inputs(case, scheme, device, seed)
        # Ten times the norm of all other columns, and within fp16's range up to H = 16384.
        inputs["x"][:, column] = 10.0 * max(H, 1) ** 0.5
        yield f"column={column}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["x"] *= float(case["eps"]) ** 0.5
    yield "mean square near eps", inputs
    for magnitude_label, magnitude in magnitudes(scheme.activation, H):
        yield magnitude_label, {**inputs, "x": of_size(inputs["x"], magnitude)}
    yield offset_weights(make_inputs(case, scheme, device, seed))


def offset_weights(inputs: Inputs) -> tuple[str, Inputs]:
    """Returns `inputs`, with a label, in which each 1 + weight lies almost half-way between two numbers of its dtype.

    A kernel that rounds 1 + weight to this dtype has the largest relative error that this fault can have."""
    half_unit = torch.full_like(inputs["weight"], 0.99 * torch.finfo(inputs["weight"].dtype).eps / 2)
    return "values: an offset plus half a unit", {**inputs, "weight": half_unit, "weight_offset": 1.0}


def cases(eps: float, *shapes: tuple[int, int], **named: float | bool) -> tuple[Case, ...]:
    """Makes one test case for each (T, H) in `shapes`."""
    return tuple(Case(T=T, H=H, eps=eps, **named) for T, H in shapes)


def drawn(T: int, H: int, eps: float, square: bool, **named: float | bool) -> Case:
    """Makes a test case from drawn values. Leaves out options that are off. If `square` is true, H = T."""
    set_options = {option_name: value for option_name, value in named.items() if value != OPTION_DEFAULTS[option_name]}
    return Case(T=T, H=T if square and T else H, eps=eps, **set_options)


OPTION_DEFAULTS = {"weight_offset": 0.0, "round_first": False}
SCHEMES = ("fp32", "fp16", "bf16", "out_fp8", "out_int8")
NORM_AXES: dict[str, Axis] = {
    **{
        "T": Sizes(1, 131_000, empty=True),
        "H": Sizes(1, 70_000, model="hidden head_dim"),
        "eps": (1e-6, 1e-5, 0.01),
        "square": (False, True),
    },
    # The options are mostly off: a kernel without an option refuses a case with it.
    **{"weight_offset": (*[0.0] * 4, 1.0), "round_first": (*[False] * 4, True)},
}
"""The axes of the domains of norms: sizes and options."""
EDGE_CASES = (
    *cases(1e-6, (1, 1), (1, 576), (3, 33), (5, 1025), (17, 128), (0, 64)),
    *cases(1e-6, (2, 1128), weight_offset=1.0),
    *cases(1e-6, (3, 111), round_first=True),
    *cases(1e-6, (2, 65537)),
)


def _padded(of: Arguments) -> Inputs:
    """Returns a wrong `eps` for each row. With it, the reference gives the result of a faulty kernel. This kernel
    divides the sum of squares by a power of two above the row size H, instead of by H."""
    H = of.x.shape[1]
    return {"eps": of.eps + of.x.double().square().mean(1, keepdim=True) * (H / (1 << H.bit_length()) - 1)}


CONTRACT = Contract(
    {"x": Argument("T H", FLOATS), "weight": Argument("H", "x")}, row_results("T H"), row_rules, scheme=row_scheme
)
SPEC = OpSpec(
    name="rmsnorm",
    reference=rmsnorm,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "scale"),
    cases={
        "smoke": cases(1e-5, (8, 64)),
        "edge": EDGE_CASES,
        "smollm2_135m": cases(1e-5, (1, 576), (16, 576), (512, 576)),
        # H = 128 is the per-head norm of queries (16 heads a token).
        "qwen3_0_6b": cases(1e-6, (1, 1024), (16, 1024), (512, 1024), (256, 128), (8192, 128)),
        "llama3_8b": cases(1e-5, (1, 4096), (16, 4096), (2048, 4096)),
    },
    in_place={"out": "x"},
    wrong={
        "eps is left out": lambda of: {"eps": 0.0},
        "the mean is over a padded row": _padded,
        "the mean is without the last column": lambda of: {
            "eps": of.eps - of.x[:, -1:].double().square() / of.x.shape[1]
        },
    },
    tolerance=tolerance,
    planted=planted,
    output_dtypes={"scale": torch.float32},
    schemes=SCHEMES,
    optional=OPTION_DEFAULTS,
    domain=Domain(NORM_AXES, drawn),
)
