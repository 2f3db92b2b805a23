"""gemm_gguf: computes `C = A @ W^T + bias` with bf16 activations and a weight in a format of GGUF.

A weight is (N, K), and row n is output channel n. Each group of 16 or 32 values along K has a scale. In some formats it
also has a minimum. The dtype of the codes says how many bits they have:

    uint8 (N, K/2)   codes 0 to 15, two in a byte, the even k in the low half
                     W = scale * (code - 8)         Q4_0
                     W = scale * code - minimum     Q4_1, Q4_K
    int8 (N, K)      codes -128 to 127
                     W = scale * code               Q8_0, Q5_0, Q6_K
                     W = scale * code - minimum     Q5_1, Q5_K

Scales and minimums are fp16 if the file has them in fp16, else fp32, so that every weight has exactly the value of the
file. `engine/load/gguf_codes.py` reads the blocks of a file.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.gemm import without_last_k
from rooflab.reference.gemm_w8a16 import within
from rooflab.reference.quantization import dequantize_groups, quantize_groups, spread
from rooflab.reference.rows import of_size
from rooflab.reference.spec import Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

GROUP_SIZES = (16, 32)
# The edges of words of 4 and 8 codes, of groups and of super-blocks.
PLANTED_K = (0, 1, 3, 4, 7, 8, 15, 16, 31, 32, 255, 256)
PLANTED_VALUE = 32.0


def group_size(K: int, groups: int) -> int:
    """Returns the group size with which K values form `groups` groups: 16 or 32. Raises `ValueError` otherwise."""
    for group in GROUP_SIZES:
        if groups * group == K:
            return group
    raise ValueError(f"scale: expected a scale for each 16 or 32 of K={K}, got {groups} groups")


def rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if `b` has not one code for each k, or if no group size gives the shape of `scale`."""
    b = arguments["b"]
    if dims["B"] != (expected_columns := dims["K"] // (2 if b.dtype == torch.uint8 else 1)):
        raise ValueError(f"b: expected {expected_columns} columns of {b.dtype} for K={dims['K']}, got {dims['B']}")
    group_size(dims["K"], dims["G"])


def gemm_gguf(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `a @ W^T + bias` in fp64, (M, N).

    a: (M, K) bf16; b: (N, K/2) uint8 or (N, K) int8, the codes; scale: (N, G), with G = K / 16 or K / 32; minimum: like
    `scale`, or None; bias: (N,) bf16."""
    CONTRACT.check({"a": a, "b": b, "scale": scale, "minimum": minimum, "bias": bias})
    product = a.double() @ dequantize_groups(b, scale, minimum).mT
    return product if bias is None else product + bias.double()


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal operands and quantises the weight, scaled by 1/sqrt(K) so that `a @ W^T` is of order one.

    The magnitudes of the weight's groups differ by up to a factor of 4, to reveal the use of a wrong group's scale.
    With minimums, the mean of a group is at most one standard deviation from 0. Scales are fp32 for groups of 16, as
    those of Q6_K, and else fp16."""
    M, N, K, group = (int(case[name]) for name in ("M", "N", "K", "group"))
    four_bits = scheme.weight == torch.uint8
    if K % group:
        raise ValueError(f"K: expected a multiple of the group of {group}, got {K}")
    dtype = torch.float32 if group == GROUP_SIZES[0] else torch.float16
    a = randn(M, K, dtype=torch.bfloat16, device=device, seed=seed)
    bias = randn(N, dtype=torch.bfloat16, device=device, seed=seed + 2) if case["bias"] else None
    minimum: torch.Tensor | None
    if torch.device(device).type == "meta":
        b = torch.empty((N, K // 2 if four_bits else K), dtype=scheme.weight, device="meta")
        scale = torch.empty((N, K // group), dtype=dtype, device="meta")
        minimum = torch.empty_like(scale) if case["minimum"] else None
    else:
        weight = randn(N, K, dtype=torch.float32, device=device, seed=seed + 1, scale=max(K, 1) ** -0.5)
        group_means, group_exponents = (
            spread(randn(N, K // group, dtype=torch.float32, device=device, seed=group_seed).clamp(-1, 1), group, K)
            for group_seed in (seed + 4, seed + 3)
        )
        if case["minimum"]:
            weight += group_means * max(K, 1) ** -0.5
        weight *= group_exponents.exp2()
        b, scale, minimum = quantize_groups(
            weight, group, 4 if four_bits else 8, minimums=bool(case["minimum"]), dtype=dtype
        )
    return {"a": a, "b": b, "scale": scale, "minimum": minimum, "bias": bias}


def cost(args: Arguments) -> Cost:
    """Returns the cost: 2 M N K tensor-core FLOPs in bf16. A bias needs one add per output element. Each tensor is read
    or written once. Multiplications by scales are not counted, as in `gemm_w4a16`."""
    (M, K), N = args.a.shape, args.b.shape[0]
    return Cost(
        read_bytes=nbytes(args.a, args.b, args.scale, args.minimum, args.bias),
        write_bytes=M * N * args.a.element_size(),
        tensor_flops={"bf16": 2.0 * M * N * K},
        vector_flops=float(M * N) if args.bias is not None else 0.0,
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of `gemm_w8a16`: the error of fp32 sums, and the rounding to bf16 of the output and of each
    dequantised weight.

    A kernel may also round the activations of a group to 16 bits, relative to the largest of the group, if the root
    mean square of those below a sixteenth of it is at least a 256th of it. This error is then below that of the
    weights' rounding."""
    weight = dequantize_groups(inputs["b"], inputs["scale"], inputs["minimum"]).mT
    return (within(inputs["a"].double(), weight, inputs["bias"], oracle[0], scheme),)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one k at the edge of a word or a group dominates the sum. Its codes are the largest
    and the smallest code in turn. Also yields activations of about 100,000."""
    K, four_bits = int(case["K"]), scheme.weight == torch.uint8
    for k in sorted({k for k in (*PLANTED_K, K - 17, K - 1) if 0 <= k < K}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, k] = PLANTED_VALUE
        if four_bits:
            code_shift = k % 2 * 4
            byte_column = inputs["b"][:, k // 2]
            byte_column &= 0xF0 >> code_shift  # the other half of the byte
            byte_column[::2] |= 15 << code_shift
        else:
            inputs["b"][::2, k], inputs["b"][1::2, k] = 127, -128
        yield f"k={k}", inputs
    for count in (1, 2) if K and not case["minimum"] else ():
        inputs = make_inputs(case, scheme, device, seed)
        for k in range(K // 2, K // 2 + count):
            inputs["a"][:, k] = 1e4
            byte_column = inputs["b"][:, k // 2 if four_bits else k]
            byte_column &= 0xF0 >> k % 2 * 4 if four_bits else 0
            byte_column |= 8 << k % 2 * 4 if four_bits else 0
        yield f"large activations ({count}) on weights of 0", inputs
    inputs = make_inputs(case, scheme, device, seed)
    yield "activations of 100,000", {**inputs, "a": of_size(inputs["a"], 1e5)}


def _case(M: int, N: int, K: int, minimum: bool = False, group: int = 32, bias: bool = False) -> Case:
    return Case(M=M, N=N, K=K, group=group, minimum=minimum, bias=bias)


def _cases(pairs: tuple[tuple[int, int], ...], *M_values: int) -> tuple[Case, ...]:
    return tuple(_case(M, N, K) for M in M_values for N, K in pairs)


CONTRACT = Contract(
    {
        "a": Argument("M K", (torch.bfloat16,), "any"),
        "b": Argument("N B", (torch.uint8, torch.int8), "any"),
        "scale": Argument("N G", FLOATS, "any"),
        "minimum": Argument("N G", FLOATS, "any", optional=True),
        "bias": Argument("N", (torch.bfloat16,), optional=True),
    },
    {"c": Result("M N", torch.bfloat16)},
    rules=rules,
    scheme=lambda arguments: "gguf_q4" if arguments["b"].dtype == torch.uint8 else "gguf_q8",
    case=lambda arguments: {
        "group": group_size(arguments["a"].shape[1], arguments["scale"].shape[1]),
        "minimum": arguments["minimum"] is not None,
    },
)
SPEC = OpSpec(
    name="gemm_gguf",
    reference=gemm_gguf,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("c",),
    cases={
        "smoke": (_case(1, 96, 256, True), _case(20, 80, 384, bias=True)),
        "edge": (
            _case(1, 1, 32),
            _case(1, 131, 96, True, bias=True),
            _case(2, 50, 2080, True),
            _case(4, 33, 1184, bias=True),
            _case(3, 40, 80, True, 16),
            _case(8, 17, 64),
            _case(17, 65, 48, False, 16, True),
            _case(65, 31, 1184, True),
            _case(129, 136, 1056, True, 16),
        ),
        # One layer: q|k|v in one product, o, gate|up in one product, down.
        "smollm2_135m": _cases(((960, 576), (576, 576), (3072, 576), (576, 1536)), 1, 16, 512),
        "qwen3_0_6b": _cases(((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 1, 16, 512),
        "llama3_8b": _cases(((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 1, 16),
    },
    wrong={
        "the last k is left out": without_last_k,
        "neighbours along K in the other order": lambda of: {"a": of.a.unflatten(1, (-1, 2)).flip(2).flatten(1)},
        "the scale of the first group for all": lambda of: {"scale": of.scale[:, :1].expand_as(of.scale)},
        "the minimum is half": lambda of: {"minimum": None if of.minimum is None else of.minimum / 2},
    },
    tolerance=tolerance,
    no_library="torch has no product with minimums, nor with groups of 16",
    planted=planted,
    schemes=("gguf_q4", "gguf_q8"),
    prepared="b",
    prepared_with=("scale", "minimum"),
    domain=Domain(
        {
            "M": Sizes(1, 300, empty=True),
            "N": Sizes(1, 300_000, model="intermediate hidden vocab"),
            "K": Sizes(32, 60_000, 32, model="hidden intermediate"),
            "group": GROUP_SIZES,
            "minimum": (False, True),
            "bias": (False, True),
        },
        Case,
    ),
)
