"""rmsnorm: y = x / sqrt(mean(x^2) + eps) * weight over the last axis.

Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.spec import FP32_ROUNDOFF, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

ACCUMULATION_FACTOR = 4.0
# The edges of 8- and 16-byte vectors, of a warp's span, and of power-of-two blocks.
PLANTED_COLUMNS = (0, 7, 8, 31, 32, 127, 128, 511, 512, 1023, 1024)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight in fp64.  x: (T, H); weight: (H,); returns (T, H)."""
    x64 = x.double()
    mean_square = (x64 * x64).mean(dim=-1, keepdim=True)  # (T, 1)
    return x64 / (mean_square + eps).sqrt() * weight.double()


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Normal x; weights are normal around one, because a kernel that ignores them must fail."""
    T, H = int(case["T"]), int(case["H"])
    x = randn(T, H, dtype=scheme.activation, device=device, seed=seed)
    weight = randn(H, dtype=scheme.weight, device=device, seed=seed + 1, scale=0.5) + 1.0
    return {"x": x, "weight": weight, "eps": float(case["eps"])}


def cost(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Cost:
    """x and weight are read once, the result is written once; four FLOPs an element and one rsqrt a row."""
    T, H = x.shape
    return Cost(read_bytes=nbytes(x, weight), write_bytes=nbytes(x), vector_flops=4.0 * T * H, sfu_ops=float(T))


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """(c/2 sqrt(H) + 4) u_32 |ref| + 2 u_out |ref| + a subnormal of the output.

    The sum of H squares has a relative error of about sqrt(H) u_32 (c = 4 for an unlucky walk), and the root halves it.
    The squares, the division by H, the rsqrt and the two products add one to two u_32 each. Two roundings to the dtype
    are allowed: Llama's own code rounds x / rms before the product with the weight, and then the product. The weight
    scales the subnormal error of the first rounding.
    """
    hidden = inputs["x"].shape[-1]
    relative = (ACCUMULATION_FACTOR / 2 * hidden**0.5 + 4.0) * FP32_ROUNDOFF + 2.0 * scheme.unit_roundoff
    subnormal = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    return (relative * oracle[0].abs() + subnormal * (1.0 + inputs["weight"].double().abs()),)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """One column that makes up most of the mean square, at every edge that H reaches; then a mean square near eps."""
    H = int(case["H"])
    for column in sorted({column for column in (*PLANTED_COLUMNS, H - 1) if 0 <= column < H}):
        inputs = make_inputs(case, scheme, device, seed)
        # Ten times the norm of all other columns, and within fp16's range up to H = 16384.
        inputs["x"][:, column] = 10.0 * max(H, 1) ** 0.5
        yield f"column={column}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    inputs["x"] *= float(case["eps"]) ** 0.5
    yield "mean square near eps", inputs


def _cases(eps: float, *shapes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case(T=T, H=H, eps=eps) for T, H in shapes)


SPEC = OpSpec(
    name="rmsnorm",
    reference=rmsnorm,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
    cases={
        "smoke": _cases(1e-5, (8, 64)),
        "edge": _cases(1e-6, (1, 1), (1, 576), (3, 33), (5, 1025), (17, 128)),
        "smollm2_135m": _cases(1e-5, (1, 576), (16, 576), (512, 576)),
        # H = 128 is the per-head norm of queries (16 heads a token).
        "qwen3_0_6b": _cases(1e-6, (1, 1024), (16, 1024), (512, 1024), (256, 128), (8192, 128)),
        "llama3_8b": _cases(1e-5, (1, 4096), (16, 4096), (2048, 4096)),
    },
    tolerance=tolerance,
    planted=planted,
    domain=Domain(
        {"T": Sizes(1, 131_000), "H": Sizes(1, 70_000), "eps": (1e-6, 1e-5, 0.01), "square": (False, True)},
        lambda T, H, eps, square: Case(T=T, H=T if square else H, eps=eps),
    ),
)
