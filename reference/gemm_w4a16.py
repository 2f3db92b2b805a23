"""gemm_w4a16: computes `C = A @ W + bias` with W = ((code - zero) * scale)^T, bf16 activations and 4-bit weights.

The codes are those of a linear layer's (N, K) weight. A byte holds two codes along K, the even k in the low half. Each
group of 32, 64 or 128 values along K has a scale, and optionally an integer zero point (default 8). K is even, and the
last group may be shorter.

Scales are bf16, rounded before the codes are chosen, so the rounding costs no accuracy (`quantization.py`). Each kernel
states whether it accepts the fp16 scales of most checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.gemm import without_last_k
from rooflab.reference.gemm_w8a16 import within
from rooflab.reference.quantization import INT4_MAX, INT4_ZERO, dequantize_int4, quantize_int4, spread
from rooflab.reference.rows import of_size
from rooflab.reference.spec import Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 128
# The edges of groups, of vectors of 32 codes and of tiles; k = 1 is the high half of the first byte.
PLANTED_K = (0, 1, 7, 31, 32, 63, 64, 127, 128, 255, 256)
PLANTED_VALUE = 32.0


def group_size(K: int, groups: int) -> int:
    """Returns the largest group size (128, 64 or 32) with which K values form `groups` groups. Raises `ValueError` if
    no size fits."""
    for group in reversed(GROUP_SIZES):
        if -(-K // group) == groups:
            return group
    raise ValueError(f"scale: expected a scale for each 32, 64 or 128 of K={K}, got {groups} groups")


def rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if K is odd, or if no group size gives the shape of `scale`."""
    if dims["K"] % 2:
        raise ValueError(f"a: expected an even K, for two codes a byte, got {dims['K']}")
    group_size(dims["K"], dims["G"])


def gemm_w4a16(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `a @ W + bias` in fp64, (M, N).

    a: (M, K) bf16; b: (N, K/2) uint8, the packed codes; scale: (N, ceil(K / group)); bias: (N,) bf16. zero: uint8 of
    the shape of `scale`; None means that every zero point is 8."""
    CONTRACT.check({"a": a, "b": b, "scale": scale, "zero": zero, "bias": bias})
    group = group_size(a.shape[1], scale.shape[1])
    product = a.double() @ dequantize_int4(b, scale, zero, group=group).mT
    return product if bias is None else product + bias.double()


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random normal operands and quantises the weight, so that the elements of `a @ W` are of order one.

    The magnitudes of the weight's groups differ, to reveal a kernel that uses a wrong group's scale. The activation is
    always bf16. The default group size is 128."""
    M, N, K, group = int(case["M"]), int(case["N"]), int(case["K"]), scheme.group or DEFAULT_GROUP_SIZE
    if K % 2:
        raise ValueError(f"K: expected an even number, two codes a byte, got {K}")
    group_count = -(-K // group)
    a = randn(M, K, dtype=torch.bfloat16, device=device, seed=seed)
    bias = randn(N, dtype=torch.bfloat16, device=device, seed=seed + 2) if case["bias"] else None
    zero: torch.Tensor | None
    if torch.device(device).type == "meta":
        b = torch.empty((N, K // 2), dtype=torch.uint8, device="meta")
        scale = torch.empty((N, group_count), dtype=torch.bfloat16, device="meta")
        zero = torch.empty((N, group_count), dtype=torch.uint8, device="meta") if case["zeros"] else None
    else:
        weight = randn(N, K, dtype=torch.float32, device=device, seed=seed + 1, scale=max(K, 1) ** -0.5)
        group_means, group_exponents = (
            spread(randn(N, group_count, dtype=torch.float32, device=device, seed=group_seed).clamp(-1, 1), group, K)
            for group_seed in (seed + 4, seed + 3)
        )
        if case["zeros"]:
            weight += group_means * max(K, 1) ** -0.5
        weight *= group_exponents.exp2()
        b, scale, zero = quantize_int4(weight, group, zeros=bool(case["zeros"]))
    return {"a": a, "b": b, "scale": scale, "zero": zero, "bias": bias}


def cost(args: Arguments) -> Cost:
    """Returns the cost: 2 M N K tensor-core FLOPs in bf16. A bias needs one add per output element. Each tensor is read
    or written once.

    Multiplications by scales are not counted, because a kernel can scale the weights when it loads them."""
    (M, K), N = args.a.shape, args.b.shape[0]
    return Cost(
        read_bytes=nbytes(args.a, args.b, args.scale, args.zero, args.bias),
        write_bytes=M * N * args.a.element_size(),
        tensor_flops={"bf16": 2.0 * M * N * K},
        vector_flops=float(M * N) if args.bias is not None else 0.0,
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of `gemm_w8a16`: the error of fp32 sums, and the rounding to bf16 of the output and of each
    dequantised weight.

    This also covers a kernel that does not round the weights. Such a kernel multiplies by `code - zero`, which bf16
    represents exactly, and then scales the fp32 sum of each group.
    """
    group = group_size(inputs["a"].shape[1], inputs["scale"].shape[1])
    weight = dequantize_int4(inputs["b"], inputs["scale"], inputs["zero"], group=group).mT
    return (within(inputs["a"].double(), weight, inputs["bias"], oracle[0], scheme),)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one k at a tile edge in K dominates the sum. Its codes are the largest and the
    smallest code in turn. Also yields activations of about 100,000."""
    K, group = int(case["K"]), scheme.group or DEFAULT_GROUP_SIZE
    last_group_start = (K - 1) // group * group
    for k in sorted({k for k in (*PLANTED_K, last_group_start - 1, last_group_start, K - 1) if 0 <= k < K}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, k] = PLANTED_VALUE
        code_shift = k % 2 * 4
        byte_column = inputs["b"][:, k // 2]
        byte_column &= 0xF0 >> code_shift  # the other half of the byte
        byte_column[::2] |= INT4_MAX << code_shift
        byte_column[1::2] |= (INT4_ZERO - 7 if inputs["zero"] is None else 0) << code_shift
        yield f"k={k}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    yield "activations of 100,000", {**inputs, "a": of_size(inputs["a"], 1e5)}


def _cases(pairs: tuple[tuple[int, int], ...], *M_values: int, zeros: bool = False) -> tuple[Case, ...]:
    return tuple(Case(M=M, N=N, K=K, zeros=zeros, bias=False) for M in M_values for N, K in pairs)


LLAMA3_8B_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))

CONTRACT = Contract(
    {
        "a": Argument("M K", (torch.bfloat16,), "any"),
        "b": Argument("N K/2", (torch.uint8,), "any"),
        "scale": Argument("N G", FLOATS, "any"),
        "zero": Argument("N G", (torch.uint8,), "any", optional=True),
        "bias": Argument("N", (torch.bfloat16,), optional=True),
    },
    {"c": Result("M N", torch.bfloat16)},
    rules=rules,
    scheme=lambda arguments: f"w4a16_g{group_size(arguments['a'].shape[1], arguments['scale'].shape[1])}",
    case=lambda arguments: {"zeros": arguments["zero"] is not None},
)
SPEC = OpSpec(
    name="gemm_w4a16",
    reference=gemm_w4a16,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("c",),
    cases={
        "smoke": (Case(M=1, N=96, K=256, zeros=False, bias=False), Case(M=20, N=80, K=384, zeros=True, bias=True)),
        "edge": (
            Case(M=1, N=1, K=2, zeros=False, bias=False),
            Case(M=1, N=131, K=130, zeros=True, bias=True),
            Case(M=2, N=50, K=2080, zeros=False, bias=False),
            Case(M=4, N=33, K=1184, zeros=True, bias=False),
            Case(M=8, N=17, K=66, zeros=False, bias=True),
            Case(M=17, N=65, K=34, zeros=True, bias=True),
            Case(M=65, N=31, K=160, zeros=False, bias=False),
            Case(M=129, N=136, K=272, zeros=True, bias=False),
        ),
        # One layer: q|k|v in one product, o, gate|up in one product, down; then squares of published sizes.
        "smollm2_135m": _cases(((960, 576), (576, 576), (3072, 576), (576, 1536)), 1, 16, 512),
        "qwen3_0_6b": _cases(((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 1, 16, 512),
        "llama3_8b": (*_cases(LLAMA3_8B_SHAPES, 1, 4, 16, 64), *_cases(LLAMA3_8B_SHAPES, 1, zeros=True)),
        "square": _cases(((8192, 8192), (16384, 16384)), 1, 2, 4, 8, 16, 32, 64),
    },
    wrong={
        "the last k is left out": without_last_k,
        "the halves of a byte in the other order": lambda of: {"b": of.b << 4 | of.b >> 4},
        "a code of 7 is zero": lambda of: {"zero": torch.full_like(of.scale, 7, dtype=torch.uint8)},
        "the scale of the first group for all": lambda of: {"scale": of.scale[:, :1].expand_as(of.scale)},
    },
    tolerance=tolerance,
    planted=planted,
    schemes=("w4a16_g128", "w4a16_g64", "w4a16_g32"),
    prepared="b",
    prepared_with=("scale", "zero"),
    domain=Domain(
        {
            "M": Sizes(1, 300, empty=True),
            "N": Sizes(1, 300_000, model="intermediate hidden vocab"),
            "K": Sizes(2, 60_000, 2, model="hidden intermediate"),
            "zeros": (False, True),
            "bias": (False, True),
        },
        Case,
    ),
)
