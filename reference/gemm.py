"""gemm: computes `C = A @ B + bias + residual`.

A case name gives the storage of A and B as in BLAS. `NN`: both are row-major. `NT`: B is a transposed view of an (N, K)
weight. `TN`: A is a transposed view of a (K, M) matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
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

# A kernel that drops, repeats or misplaces one k shows at the edges of 16-, 64- and 128-wide tiles.
PLANTED_K = (0, 15, 16, 63, 64, 127, 128)
ACCUMULATION_FACTOR = 4.0
TF32_ROUNDOFF = 2.0**-10
"""The largest relative error of an fp32 value whose mantissa a tensor core cuts to ten bits."""
TF32_FACTOR = 2.5


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    precision: str = "ieee",
) -> torch.Tensor:
    """Returns `a @ b + bias + residual` in fp64, (M, N). a: (M, K); b: (K, N); bias: (N,); residual: (M, N).

    `precision` says how a kernel may round fp32 operands: `ieee` (not at all) or `tf32`. The reference rounds nothing.
    """
    CONTRACT.check({"a": a, "b": b, "bias": bias, "residual": residual, "precision": precision})
    product = a.double() @ b.double()
    for addend in (bias, residual):
        if addend is not None:
            product = product + addend.double()
    return product


def rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` unless `precision` is `ieee`, or is `tf32` with fp32 operands."""
    a, precision = arguments["a"], arguments.get("precision", "ieee")
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"precision: expected ieee or tf32, got {precision!r}")
    if precision == "tf32" and a.dtype != torch.float32:
        raise ValueError(f"precision: expected ieee with {a.dtype} operands, got tf32, which is for torch.float32")


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random operands. `b` is scaled by 1/sqrt(K), so that `a @ b` is of order one for every K."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    b_layout = case["layout"]
    if b_layout not in ("NN", "NT", "TN"):
        raise ValueError(f"layout: expected NN, NT or TN, got {b_layout!r}")
    a_shape = (K, M) if b_layout == "TN" else (M, K)
    b_shape = (N, K) if b_layout == "NT" else (K, N)
    a = randn(*a_shape, dtype=scheme.activation, device=device, seed=seed)
    b = randn(*b_shape, dtype=scheme.weight, device=device, seed=seed + 1, scale=max(K, 1) ** -0.5)
    bias = randn(N, dtype=scheme.weight, device=device, seed=seed + 2) if case["bias"] else None
    inputs: Inputs = {"a": a.mT if b_layout == "TN" else a, "b": b.mT if b_layout == "NT" else b, "bias": bias}
    if case.get("residual"):
        inputs["residual"] = randn(M, N, dtype=scheme.output, device=device, seed=seed + 3)
    if scheme.name == "tf32":
        inputs["precision"] = "tf32"
    return inputs


def cost(args: Arguments) -> Cost:
    """Returns the cost: 2 M N K tensor-core FLOPs. A bias and a residual each need one add per output element. Each
    tensor is read or written once."""
    (M, K), N = args.a.shape, args.b.shape[1]
    addend_count = sum(addend is not None for addend in (args.bias, args.residual))
    return Cost(
        read_bytes=nbytes(args.a, args.b, args.bias, args.residual),
        write_bytes=M * N * args.a.element_size(),
        tensor_flops={"tf32" if args.precision == "tf32" else DTYPE_NAMES[args.a.dtype]: 2.0 * M * N * K},
        vector_flops=float(addend_count * M * N),
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance:

        c * u_acc * sqrt(K) * (size + |bias| + |residual|)  +  u_out * |ref|  +  half a subnormal

    c = 4. u_acc = 2**-24 is the unit roundoff of fp32, in which all sums are computed. u_out is the unit roundoff of
    the output dtype. `size` bounds the partial sums. K rounding errors of random sign grow as sqrt(K) (a random walk),
    and c = 4 allows an unlucky walk.

    In 16 bits, `size` is the largest possible value, |A| |B|, because tensor cores truncate and all errors have the
    same sign. In fp32, `size` is |ref| + sqrt((A*A) (B*B)). This smaller size rejects a kernel that uses TF32.

    In tf32, the tolerance has one more term, for the rounding of the operands:

        u * |A B|  +  2.5 * u * sqrt((A*A) (B*B)),  u = 2**-10

    The relative error of a product a * b is between 0 and 2 u. Its mean is below u, which gives u * |A B|. Its standard
    deviation is 0.3 u, so 2.5 u covers eight standard deviations. Operands rounded to bf16 have a standard deviation of
    2.4 u and fail."""
    a, b = inputs["a"].double(), inputs["b"].double()
    random_walk_size = (a.square() @ b.square()).sqrt() if scheme.activation == torch.float32 else None
    sum_size = a.abs() @ b.abs() if random_walk_size is None else oracle[0].abs() + random_walk_size
    for addend in (inputs["bias"], inputs.get("residual")):
        if addend is not None:
            sum_size += addend.double().abs()
    error_limit = ACCUMULATION_FACTOR * FP32_ROUNDOFF * max(a.shape[1], 1) ** 0.5 * sum_size
    if scheme.name == "tf32" and random_walk_size is not None:
        product = gemm(inputs["a"], inputs["b"]).abs()
        error_limit += TF32_ROUNDOFF * (TF32_FACTOR * random_walk_size + product)
    subnormal_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    return (error_limit + scheme.unit_roundoff * oracle[0].abs() + subnormal_error,)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one index k, at a tile edge in K, dominates the sum over all other k."""
    K = int(case["K"])
    for k in sorted({k for k in (*PLANTED_K, K - 1) if 0 <= k < K}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, k] *= 16.0
        inputs["b"][k] *= 16.0
        yield f"k={k}", inputs
    if K > 1:
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, :2] = 300.0
        inputs["b"][0], inputs["b"][1] = 300.0, -300.0
        yield "sums that leave fp16 and come back", inputs


def _cases(pairs: tuple[tuple[int, int], ...], *M_values: int) -> tuple[Case, ...]:
    return tuple(Case(M=M, N=N, K=K, layout="NT", bias=False) for M in M_values for N, K in pairs)


def _drawn(equal: str, **values: Any) -> Case:
    """Makes a test case from random sizes. The dimensions named in `equal` (such as "MK") get one size, so that no
    shape tells the operands apart."""
    equal_dims = equal if values["M"] else ""  # an empty weight cannot be packed
    return Case(**values | dict.fromkeys(equal_dims, values[equal[:1] or "M"]))


def without_last_k(of: Arguments) -> Inputs:
    """Imitates a faulty kernel: every sum over k lacks its last term."""
    a = of.a.clone()
    a[:, -1:] = 0.0
    return {"a": a}


def in_ten_bits(of: Arguments) -> Inputs:
    """Truncates fp32 operands to ten mantissa bits, as TF32 does."""
    truncated_operands = [(x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (of.a, of.b)]
    return {"a": truncated_operands[0], "b": truncated_operands[1]}


CONTRACT = Contract(
    {
        "a": Argument("M K", FLOATS, "any"),
        "b": Argument("K N", "a", "any"),
        "bias": Argument("N", "a", optional=True),
        "residual": Argument("M N", "a", optional=True),
    },
    {"c": Result("M N", "a")},
    rules=rules,
    scheme=lambda arguments: "tf32" if arguments.get("precision") == "tf32" else DTYPE_NAMES[arguments["a"].dtype],
    case=lambda arguments: {"residual": arguments.get("residual") is not None},
)
SPEC = OpSpec(
    name="gemm",
    reference=gemm,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("c",),
    cases={
        "smoke": (
            Case(M=32, N=96, K=64, layout="NT", bias=False),
            Case(M=64, N=48, K=80, layout="NN", bias=True),
            Case(M=3, N=96, K=128, layout="NT", bias=True),
        ),
        "edge": (
            Case(M=1, N=1, K=1, layout="NN", bias=False),
            Case(M=1, N=131, K=129, layout="NT", bias=True),
            Case(M=3, N=24, K=0, layout="NT", bias=True, residual=True),
            Case(M=17, N=65, K=33, layout="NN", bias=True),
            Case(M=65, N=31, K=130, layout="TN", bias=False),
            Case(M=129, N=1, K=16, layout="NT", bias=False),
            # TMA needs strides that are multiples of 16 bytes; otherwise the dimensions fit no whole tiles.
            Case(M=127, N=136, K=200, layout="NT", bias=True, residual=True),
            Case(M=65, N=24, K=72, layout="NN", bias=False),
            Case(M=136, N=264, K=63, layout="TN", bias=True),
        ),
        # One layer: q|k|v in one product, o, gate|up in one product, down; then the vocabulary, for few rows only.
        "smollm2_135m": (
            *_cases(((960, 576), (576, 576), (3072, 576), (576, 1536)), 1, 16, 512),
            *_cases(((49152, 576),), 1, 16),
        ),
        "qwen3_0_6b": (
            *_cases(((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 1, 16, 512),
            *_cases(((151936, 1024),), 1, 16),
        ),
        "llama3_8b": (
            *_cases(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 1, 16, 2048),
            *_cases(((128256, 4096),), 1, 16),
        ),
    },
    in_place={"c": "residual"},
    wrong={
        "the last k is left out": without_last_k,
        "fp32 operands have ten bits": lambda of: (
            {} if of.precision == "tf32" or of.a.itemsize < 4 else in_ten_bits(of)
        ),
        "the residual is added twice": lambda of: {"residual": None if of.residual is None else 2 * of.residual},
    },
    tolerance=tolerance,
    planted=planted,
    schemes=("fp32", "fp16", "bf16", "tf32"),
    optional={"residual": False},
    prepared="b",
    domain=Domain(
        {
            "equal": ("", "MN", "NK", "MNK"),
            "M": Sizes(1, 5_000, empty=True),
            "N": Sizes(1, 300_000, model="intermediate hidden vocab"),
            "K": Sizes(1, 60_000, model="hidden intermediate"),
            "layout": ("NT", "NN", "TN"),
            "bias": (False, True),
            "residual": (False, True),
        },
        _drawn,
    ),
)
