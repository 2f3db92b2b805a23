"""fused_add_rmsnorm: adds the residual and computes the RMSNorm of the sum. A decoder layer does this twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference import rmsnorm
from rooflab.reference.compare import exact
from rooflab.reference.contract import FLOATS, Argument, Contract, Result
from rooflab.reference.domain import Domain
from rooflab.reference.rows import (
    magnitudes,
    of_size,
    planted_columns,
    quantized_rows,
    row_results,
    row_rules,
    row_scheme,
)
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost


def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
    quantize: str | None = None,
) -> Outputs:
    """Returns the norm `rmsnorm(s) * (weight + weight_offset)`, and the sum s = x + residual, rounded to the dtype of
    x.

    x, residual: (T, H); weight: (H,). Returns two tensors (T, H) in fp64. The norm uses the rounded sum, as in
    transformers. The options are those of `rmsnorm`. With `quantize`, also returns the scales (T,)."""
    check_shape("residual", residual, *x.shape)
    new_residual = (x.double() + residual.double()).to(x.dtype).double()
    normed_values = rmsnorm.normed(new_residual, weight, eps, weight_offset, x.dtype if round_first else None)
    out, *row_scales = quantized_rows(normed_values, quantize)
    return out, new_residual, *row_scales


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal random tensors: `x`, a larger `residual` as in a model, and weights around 1."""
    T, H = int(case["T"]), int(case["H"])
    x = randn(T, H, dtype=scheme.activation, device=device, seed=seed)
    residual = randn(T, H, dtype=scheme.activation, device=device, seed=seed + 1, scale=3.0)
    weight = randn(H, dtype=scheme.weight, device=device, seed=seed + 2, scale=0.5, mean=1.0)
    eps = float(case["eps"])
    return {"x": x, "residual": residual, "weight": weight, "eps": eps, **rmsnorm.options(case, scheme)}


def cost(args: Arguments) -> Cost:
    """Returns the cost: two arrays read, two arrays written, five FLOPs per element and one rsqrt per row."""
    T, H = args.x.shape
    written_bytes = nbytes(args.x) + (nbytes(args.x) if args.quantize is None else T * H + 4 * T)
    return Cost(nbytes(args.x, args.residual, args.weight), written_bytes, vector_flops=5.0 * T * H, sfu_ops=float(T))


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of `rmsnorm` for the norm, and a tolerance of zero for the sum.

    The rounded sum has exactly one right value, even if a kernel first rounds the sum to a wider format. This holds if
    the wider format has at least 2p + 2 bits, with p the bits of the dtype. fp32 has 24 bits, enough for fp16 (p = 11)
    and bf16 (p = 8). fp64 has 53 bits, enough for fp32 (p = 24)."""
    out, new_residual, *row_scales = oracle
    norm_limit, *scale_limits = rmsnorm.tolerance(inputs, (out, *row_scales), scheme)
    return norm_limit, exact(new_residual), *scale_limits


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one column of `x` or `residual` dominates the mean square. Also yields a mean square
    near eps."""
    H = int(case["H"])
    for column in planted_columns(H):
        for name in ("x", "residual"):
            inputs = make_inputs(case, scheme, device, seed)
            inputs[name][:, column] = 30.0 * max(H, 1) ** 0.5
            yield f"{name} column={column}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["x"] *= float(case["eps"]) ** 0.5
    inputs["residual"] *= float(case["eps"]) ** 0.5
    yield "mean square near eps", inputs
    for size_label, magnitude in magnitudes(scheme.activation, 4 * H):
        yield size_label, {**inputs, **{name: of_size(inputs[name], 0.4 * magnitude) for name in ("x", "residual")}}
    yield rmsnorm.offset_weights(make_inputs(case, scheme, device, seed))


def _sum_not_rounded(of: Arguments) -> Outputs:
    out, _, *row_scales = fused_add_rmsnorm(**vars(of))
    return out, of.x.double() + of.residual.double(), *row_scales


def _norm_of_x(of: Arguments) -> Outputs:
    _, new_residual, *_ = fused_add_rmsnorm(**vars(of))
    out, *row_scales = rmsnorm.SPEC.oracle({name: value for name, value in vars(of).items() if name != "residual"})
    return out, new_residual, *row_scales


CONTRACT = Contract(
    {"x": Argument("T H", FLOATS), "residual": Argument("T H", "x"), "weight": Argument("H", "x")},
    row_results("T H", new_residual=Result("T H", "x")),
    row_rules,
    scheme=row_scheme,
)
SPEC = OpSpec(
    name="fused_add_rmsnorm",
    reference=fused_add_rmsnorm,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "new_residual", "scale"),
    cases={
        "smoke": rmsnorm.cases(1e-5, (8, 64)),
        "edge": rmsnorm.EDGE_CASES,
        "smollm2_135m": rmsnorm.cases(1e-5, (1, 576), (16, 576), (512, 576)),
        "qwen3_0_6b": rmsnorm.cases(1e-6, (1, 1024), (16, 1024), (512, 1024)),
        "llama3_8b": rmsnorm.cases(1e-5, (1, 4096), (16, 4096), (2048, 4096)),
    },
    in_place={"out": "x", "new_residual": "residual"},
    wrong={
        "eps is left out": lambda of: {"eps": 0.0},
        "the sum is not rounded": _sum_not_rounded,
        "the norm is that of x alone": _norm_of_x,
    },
    tolerance=tolerance,
    planted=planted,
    output_dtypes={"new_residual": "activation", "scale": torch.float32},
    schemes=rmsnorm.SCHEMES,
    optional=rmsnorm.OPTION_DEFAULTS,
    domain=Domain(rmsnorm.NORM_AXES, rmsnorm.drawn),
)
