"""gemm_w8a16: computes `C = A @ (scale * B) + bias`, with bf16 activations and int8 weights, one scale per column.

B is (K, N), stored as the (N, K) weight of a linear layer: `b = weight.mT`. The scales are bf16, because torch's own
operator needs this. They are rounded before the codes are chosen, so the rounding costs no accuracy
(`quantization.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, Contract, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.gemm import without_last_k
from rooflab.reference.quantization import INT8_MAX, dequantize_int8, quantize_int8
from rooflab.reference.rows import of_size
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

# A kernel that drops, repeats or misplaces one k fails at the edges of vectors of 16 codes, of tiles, or of K.
PLANTED_K = (0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256)
PLANTED_VALUE = 16.0
ACCUMULATION_FACTOR = 4.0
ROUNDED_WEIGHT_FACTOR = 3.5
"""The constant c for rounded weights: eight standard deviations of the walk, or the error of one dominant weight."""


def gemm_w8a16(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `a @ (scale * b) + bias` in fp64.  a: (M, K) bf16; b: (K, N) int8; scale: (N,); bias: (N,) bf16."""
    CONTRACT.check({"a": a, "b": b, "scale": scale, "bias": bias})
    product = a.double() @ dequantize_int8(b.mT, scale).mT
    return product if bias is None else product + bias.double()


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal operands and quantises the weight W. W is scaled by 1/sqrt(K), so that `a @ W` is of order one.

    Output channels of W differ in magnitude by up to a factor of 4. The activation is always bf16, and W is always
    int8."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    a = randn(M, K, dtype=torch.bfloat16, device=device, seed=seed)
    bias = randn(N, dtype=torch.bfloat16, device=device, seed=seed + 2) if case["bias"] else None
    if torch.device(device).type == "meta":
        weight_codes = torch.empty((N, K), dtype=torch.int8, device="meta")
        scale = torch.empty((N,), dtype=torch.bfloat16, device="meta")
    else:
        weight = randn(N, K, dtype=torch.float32, device=device, seed=seed + 1, scale=max(K, 1) ** -0.5)
        channel_factors = randn(N, dtype=torch.float32, device=device, seed=seed + 3).clamp(-1, 1).exp2()
        weight_codes, scale = quantize_int8(weight * channel_factors[:, None])
    return {"a": a, "b": weight_codes.mT, "scale": scale, "bias": bias}


def cost(args: Arguments) -> Cost:
    """Returns the cost: 2 M N K tensor-core FLOPs in bf16. An output element needs a multiplication by the scale and an
    add of the bias. Each tensor is read or written once."""
    (M, K), N = args.a.shape, args.b.shape[1]
    return Cost(
        read_bytes=nbytes(args.a, args.b, args.scale, args.bias),
        write_bytes=M * N * args.a.element_size(),
        tensor_flops={"bf16": 2.0 * M * N * K},
        vector_flops=float(M * N * (1 if args.bias is None else 2)),
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance:

        c * u * sqrt(K) * (|A| |W| + |bias|)  +  3.5 * v * sqrt((A*A) (W*W))  +  u_out * |ref|  +  half a subnormal

    W is scale * b. The first term is the error of fp32 sums, as in `gemm`: u = 2**-24, c = 4. It is enough for a kernel
    that multiplies the int8 codes, which bf16 represents exactly, and then scales the sum.

    The second term allows a kernel that rounds W to bf16. Each weight then has a relative error of up to v = 2**-8. The
    root mean square of this error is 0.41 v if the significands of W are uniform, and at most 0.43 v if their
    logarithms are uniform. With random signs, the errors add up as a random walk, and 3.5 v is eight standard
    deviations. If one product dominates, 3.5 v also covers its error."""
    a, bias = inputs["a"].double(), inputs["bias"]
    weight = dequantize_int8(inputs["b"].mT, inputs["scale"]).mT
    return (within(a, weight, bias, oracle[0], scheme),)


def within(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """Returns the largest allowed error of `a @ weight + bias`. a and weight (K, N) are fp64; weight is dequantised."""
    sum_size = a.abs() @ weight.abs()
    if bias is not None:
        sum_size = sum_size + bias.double().abs()
    error_limit = ACCUMULATION_FACTOR * FP32_ROUNDOFF * max(a.shape[1], 1) ** 0.5 * sum_size
    bf16_roundoff = torch.finfo(torch.bfloat16).eps / 2
    error_limit = error_limit + ROUNDED_WEIGHT_FACTOR * bf16_roundoff * (a.square() @ weight.square()).sqrt()
    subnormal_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    total_limit: torch.Tensor = error_limit + scheme.unit_roundoff * product.abs() + subnormal_error
    return total_limit


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one k at a tile edge in K dominates the sum. Its codes are 127 and -128."""
    K = int(case["K"])
    for k in sorted({k for k in (*PLANTED_K, K - 1) if 0 <= k < K}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, k] = PLANTED_VALUE
        inputs["b"][k, ::2] = INT8_MAX
        inputs["b"][k, 1::2] = -INT8_MAX - 1
        yield f"k={k}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    yield "activations of 100,000", {**inputs, "a": of_size(inputs["a"], 1e5)}


def _cases(pairs: tuple[tuple[int, int], ...], *M_values: int) -> tuple[Case, ...]:
    return tuple(Case(M=M, N=N, K=K, bias=False) for M in M_values for N, K in pairs)


CONTRACT = Contract(
    {
        "a": Argument("M K", (torch.bfloat16,), "any"),
        "b": Argument("K N", (torch.int8,), "any"),
        "scale": Argument("N", FLOATS),
        "bias": Argument("N", (torch.bfloat16,), optional=True),
    },
    {"c": Result("M N", torch.bfloat16)},
    scheme=lambda arguments: "w8a16",
)
SPEC = OpSpec(
    name="gemm_w8a16",
    reference=gemm_w8a16,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("c",),
    cases={
        "smoke": (Case(M=1, N=96, K=256, bias=False), Case(M=20, N=72, K=208, bias=True)),
        "edge": (
            Case(M=1, N=1, K=1, bias=False),
            Case(M=1, N=131, K=129, bias=True),
            Case(M=3, N=50, K=1040, bias=False),
            Case(M=4, N=33, K=2112, bias=True),
            Case(M=8, N=17, K=66, bias=False),
            Case(M=17, N=65, K=33, bias=True),
            Case(M=65, N=31, K=144, bias=False),
            Case(M=129, N=136, K=272, bias=True),
        ),
        # One layer: q|k|v in one product, o, gate|up in one product, down; then a square of a size that others publish.
        "smollm2_135m": _cases(((960, 576), (576, 576), (3072, 576), (576, 1536)), 1, 16, 512),
        "qwen3_0_6b": _cases(((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 1, 16, 512),
        "llama3_8b": _cases(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 1, 4, 16, 64),
        "square": _cases(((8192, 8192), (16384, 16384)), 1, 2, 4, 8, 16, 32, 64),
    },
    wrong={
        "the last k is left out": without_last_k,
        "the scale of the first column for all": lambda of: {"scale": of.scale[:1].repeat(len(of.scale))},
        "negative codes are 0": lambda of: {"b": of.b.clamp(min=0)},
    },
    tolerance=tolerance,
    planted=planted,
    schemes=("w8a16",),
    prepared="b",
    prepared_with=("scale",),
    domain=Domain(
        {
            "M": Sizes(1, 300, empty=True),
            "N": Sizes(1, 300_000, model="intermediate hidden vocab"),
            "K": Sizes(1, 60_000, model="hidden intermediate"),
            "bias": (False, True),
        },
        Case,
    ),
)
