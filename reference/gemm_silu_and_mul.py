"""gemm_silu_and_mul: computes `silu(A @ gate) * (A @ up)`, the gated matrix product of a feed-forward layer (Shazeer,
"GLU Variants Improve Transformer", 2020).

B is (K, 2 I): first the I columns of `gate`, then those of `up`. In a case name, `NN` means a row-major B, and `NT` a
transposed view of a (2 I, K) weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, Contract, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.gemm import in_ten_bits, without_last_k
from rooflab.reference.spec import (
    DTYPE_NAMES,
    FP32_ROUNDOFF,
    Arguments,
    Case,
    Inputs,
    OpSpec,
    Outputs,
    Scheme,
    nbytes,
    randn,
)
from rooflab.roofline.model import Cost

# A kernel that drops, repeats or misplaces one k fails at the edges of 16-, 64- and 128-wide tiles.
PLANTED_K = (0, 15, 16, 63, 64, 127, 128)
PLANTED_VALUE = 8.0
"""The standard deviation of what one dominant k adds to `gate` and `up`; all other k together have SPREAD."""
PLANTED_GATES = (-100.0, -20.0, 20.0, 100.0)
"""Gates at the limits of the arithmetic: exp overflows fp32 above 88.7; sigmoid rounds to 1 above about 17."""
PRODUCT_STD = 2.0
"""The standard deviation of `gate` and `up`, so that inputs lie on both sides of silu's bend."""
ACCUMULATION_FACTOR = 4.0
SILU_SLOPE = 1.1
"""A bound on silu's slope, which is at most 1.0998 (at gate = 2.4)."""


def _gate_and_up(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = a.double() @ b.double()
    gate_columns = product.shape[1] // 2
    return product[:, :gate_columns], product[:, gate_columns:]


def gemm_silu_and_mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns `silu(a @ gate) * (a @ up)` in fp64, (M, I). a: (M, K); b: (K, 2 I), with the columns of `gate` first."""
    CONTRACT.check({"a": a, "b": b})
    gate, up = _gate_and_up(a, b)
    return gate / (1.0 + torch.exp(-gate)) * up


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random operands. `b` is scaled by 2/sqrt(K), so that `a @ b` has standard deviation 2 for every K."""
    M, I, K, weight_layout = int(case["M"]), int(case["I"]), int(case["K"]), case["layout"]
    if weight_layout not in ("NN", "NT"):
        raise ValueError(f"layout: expected NN or NT, got {weight_layout!r}")
    a = randn(M, K, dtype=scheme.activation, device=device, seed=seed)
    b_shape = (2 * I, K) if weight_layout == "NT" else (K, 2 * I)
    b = randn(*b_shape, dtype=scheme.weight, device=device, seed=seed + 1, scale=PRODUCT_STD * max(K, 1) ** -0.5)
    return {"a": a, "b": b.mT if weight_layout == "NT" else b}


def cost(args: Arguments) -> Cost:
    """Returns the cost: 4 M I K tensor-core FLOPs. An output element needs four FLOPs, an exp and a reciprocal. Each
    tensor is read or written once."""
    (M, K), weight_columns = args.a.shape, args.b.shape[1]
    output_count = M * (weight_columns // 2)
    return Cost(
        read_bytes=nbytes(args.a, args.b),
        write_bytes=output_count * args.a.element_size(),
        tensor_flops={DTYPE_NAMES[args.a.dtype]: 2.0 * M * weight_columns * K},
        vector_flops=4.0 * output_count,
        sfu_ops=2.0 * output_count,
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of each output value: the error of `a @ b` times the slope of silu, plus the error of silu.

        1.1 * e_gate * (|up| + e_up)  +  |silu(gate)| * e_up  +  e_silu
        e_silu = (8 + 2 * |gate|) * u_32 * |ref| + 2 * u_out * |ref| + 2**-126 * |gate * up| + subnormals

    gate and up are the two halves of `a @ b`. e_gate and e_up are the tolerances that the op `gemm` has for them. They
    allow one rounding to the dtype, because library calls round `a @ b`. 1.1 is the largest |silu'|. e_silu is the
    tolerance of the op `silu_and_mul`. u_32 and u_out are the unit roundoffs of fp32 and of the output.
    """
    gate, up = _gate_and_up(inputs["a"], inputs["b"])
    product_error = _product_error(inputs["a"].double(), inputs["b"].double(), torch.cat((gate, up), 1), scheme)
    gate_error, up_error = product_error[:, : gate.shape[1]], product_error[:, gate.shape[1] :]
    silu = gate / (1.0 + torch.exp(-gate))
    propagated_error = SILU_SLOPE * gate_error * (up.abs() + up_error) + silu.abs() * up_error
    relative_error = (8.0 + 2.0 * gate.abs()) * FP32_ROUNDOFF + 2.0 * scheme.unit_roundoff
    tiny_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    activation_error = relative_error * oracle[0].abs() + 2.0**-126 * (gate * up).abs() + tiny_error * (1.0 + up.abs())
    return (propagated_error + activation_error,)


def _product_error(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns the error that the `gemm` op allows for each value of `product = a @ b`."""
    if scheme.activation == torch.float32:
        partial_sums = product.abs() + (a.square() @ b.square()).sqrt()
    else:
        partial_sums = a.abs() @ b.abs()
    error_factor: float = ACCUMULATION_FACTOR * FP32_ROUNDOFF * max(a.shape[1], 1) ** 0.5
    subnormal_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    return error_factor * partial_sums + scheme.unit_roundoff * product.abs() + subnormal_error


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one index k, at a tile edge in K, dominates the sum over all other k. Also yields
    large gates in the first and the last column: a simple exp(-gate) overflows there."""
    I, K = int(case["I"]), int(case["K"])
    for k in sorted({k for k in (*PLANTED_K, K - 1) if 0 <= k < K}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["b"][k] *= PLANTED_VALUE / PRODUCT_STD * K**0.5
        yield f"k={k}", inputs
    for gate in PLANTED_GATES if K else ():
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, 0] = 1.0
        inputs["b"][0, :1] = gate
        inputs["b"][0, I - 1 : I] = gate
        yield f"gate={gate:g}", inputs


def _cases(I: int, K: int, *M_values: int) -> tuple[Case, ...]:
    return tuple(Case(M=M, I=I, K=K, layout="NT") for M in M_values)


CONTRACT = Contract(
    {"a": Argument("M K", FLOATS, "any"), "b": Argument("K 2I", "a", "any")}, {"out": Result("M I", "a")}
)
SPEC = OpSpec(
    name="gemm_silu_and_mul",
    reference=gemm_silu_and_mul,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
    cases={
        "smoke": (Case(M=32, I=48, K=64, layout="NT"), Case(M=64, I=24, K=80, layout="NN")),
        "edge": (
            Case(M=1, I=1, K=1, layout="NN"),
            Case(M=1, I=131, K=129, layout="NT"),
            Case(M=17, I=65, K=33, layout="NN"),
            Case(M=129, I=1, K=16, layout="NT"),
            # TMA needs strides that are multiples of 16 bytes; otherwise the dimensions fit no whole tiles.
            Case(M=67, I=72, K=200, layout="NT"),
            Case(M=136, I=136, K=72, layout="NT"),
            Case(M=65, I=24, K=72, layout="NN"),
        ),
        "smollm2_135m": _cases(1536, 576, 1, 16, 512),
        "qwen3_0_6b": _cases(3072, 1024, 1, 16, 512),
        "llama3_8b": _cases(14336, 4096, 1, 16, 2048),
    },
    wrong={
        "the last k is left out": without_last_k,
        "up has the first columns": lambda of: {"b": of.b.roll(of.b.shape[1] // 2, 1)},
        "fp32 operands have ten bits": lambda of: {} if of.a.itemsize < 4 else in_ten_bits(of),
    },
    tolerance=tolerance,
    planted=planted,
    prepared="b",
    domain=Domain(
        {
            "M": Sizes(1, 5_000, empty=True),
            "I": Sizes(1, 70_000, model="intermediate expert_intermediate"),
            "K": Sizes(1, 20_000, model="hidden"),
            "layout": ("NT", "NN"),
        },
        Case,
    ),
)
