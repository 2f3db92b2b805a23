"""fused_add_rmsnorm: the residual add and the norm after it, which a decoder layer has twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.compare import exact
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.spec import FP32_ROUNDOFF, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

ACCUMULATION_FACTOR = 4.0
# The edges of 8- and 16-byte vectors, of a warp's span, and of power-of-two blocks.
PLANTED_COLUMNS = (0, 7, 8, 31, 32, 127, 128, 511, 512, 1023, 1024)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(s) * weight, s) with s = x + residual rounded to the dtype of x.

    x, residual: (T, H); weight: (H,); returns out (T, H) and s (T, H), both in fp64. The norm takes the rounded sum,
    which is also the new residual.
    """
    new_residual = (x.double() + residual.double()).to(x.dtype).double()
    mean_square = (new_residual * new_residual).mean(dim=-1, keepdim=True)  # (T, 1)
    return new_residual / (mean_square + eps).sqrt() * weight.double(), new_residual


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Normal x, a normal residual that is larger, as in a model, and weights that are normal around one."""
    T, H = int(case["T"]), int(case["H"])
    x = randn(T, H, dtype=scheme.activation, device=device, seed=seed)
    residual = randn(T, H, dtype=scheme.activation, device=device, seed=seed + 1, scale=3.0)
    weight = randn(H, dtype=scheme.weight, device=device, seed=seed + 2, scale=0.5) + 1.0
    return {"x": x, "residual": residual, "weight": weight, "eps": float(case["eps"])}


def cost(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Cost:
    """Two arrays in, two out; five FLOPs an element and one rsqrt a row."""
    T, H = x.shape
    return Cost(
        read_bytes=nbytes(x, residual, weight), write_bytes=2 * nbytes(x), vector_flops=5.0 * T * H, sfu_ops=float(T)
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Zero for the sum; for the norm (c/2 sqrt(H) + 4) u_32 |ref| + 2 u_out |ref| + a subnormal of the output.

    The sum has one right value: if it is computed in at least 2p + 2 bits (24 for p = 11 of fp16 and 8 of bf16, 53 for
    24 of fp32), two roundings give the same value as one. So the norm has the same input as the oracle's, and its error
    is that of `rmsnorm`.
    """
    hidden = inputs["x"].shape[-1]
    relative = (ACCUMULATION_FACTOR / 2 * hidden**0.5 + 4.0) * FP32_ROUNDOFF + 2.0 * scheme.unit_roundoff
    subnormal = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    out = relative * oracle[0].abs() + subnormal * (1.0 + inputs["weight"].double().abs())
    return out, exact(oracle[1])


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """One column that makes up most of the mean square, in x or in the residual; then a mean square near eps."""
    H = int(case["H"])
    for column in sorted({column for column in (*PLANTED_COLUMNS, H - 1) if 0 <= column < H}):
        for name in ("x", "residual"):
            inputs = make_inputs(case, scheme, device, seed)
            inputs[name][:, column] = 30.0 * max(H, 1) ** 0.5
            yield f"{name} column={column}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["x"] *= float(case["eps"]) ** 0.5
    inputs["residual"] *= float(case["eps"]) ** 0.5
    yield "mean square near eps", inputs


def _cases(eps: float, *shapes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case(T=T, H=H, eps=eps) for T, H in shapes)


SPEC = OpSpec(
    name="fused_add_rmsnorm",
    reference=fused_add_rmsnorm,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out", "new_residual"),
    cases={
        "smoke": _cases(1e-5, (8, 64)),
        "edge": _cases(1e-6, (1, 1), (1, 576), (3, 33), (5, 1025), (17, 128)),
        "smollm2_135m": _cases(1e-5, (1, 576), (16, 576), (512, 576)),
        "qwen3_0_6b": _cases(1e-6, (1, 1024), (16, 1024), (512, 1024)),
        "llama3_8b": _cases(1e-5, (1, 4096), (16, 4096), (2048, 4096)),
    },
    tolerance=tolerance,
    planted=planted,
    domain=Domain(
        {"T": Sizes(1, 131_000), "H": Sizes(1, 70_000), "eps": (1e-6, 1e-5, 0.01), "square": (False, True)},
        lambda T, H, eps, square: Case(T=T, H=T if square else H, eps=eps),
    ),
)
