"""gemm_fp8: computes `C = (a_scale * A) @ (b_scale * B) + bias`, with e4m3 operands and a bf16 result.

A matrix has one scale, or one scale per block: 1 x 128 values of A or 128 x 128 values of B (DeepSeek-V3, arXiv
2412.19437, section 3.3.2). B is (K, N), stored as (N, K): `b = weight.mT`. Hopper's fp8 wgmma needs this layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.contract import ANY_SHAPE, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.gemm import without_last_k
from rooflab.reference.rows import MIN_SCALE
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
GROUP_SIZE = 128
"""The number of values along K, and along N of b, that share a block scale."""
# A kernel that drops, repeats or misplaces one k fails at the edges of wgmma's 32 of K and of a scale's 128.
PLANTED_K = (0, 15, 16, 31, 32, 63, 64, 127, 128)
PLANTED_VALUE = 16.0
ACCUMULATION_FACTOR = 4.0
TRUNCATION_ERROR = 2.0**-13
"""Hopper's fp8 accumulation cuts each addend by up to this part of the largest addend (MMA-Sim, arXiv 2511.10909)."""
TRUNCATIONS_PER_INSTRUCTION = 3.0
INSTRUCTION_K = 32
K_PER_PROMOTION = 128


def quantize_fp8(x: torch.Tensor, group: tuple[int, int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises x (R, C) to e4m3, with one scale for all of x, or one scale for each group of `group` = (rows,
    columns).

    Returns e4m3 codes (R, C) and fp32 scales, () or (ceil(R / rows), ceil(C / columns)). The largest magnitude of a
    group becomes 448, the largest value of e4m3. A group of zeros has the scale 1. Raises `ValueError` if x is not a
    matrix."""
    if x.ndim != 2:
        raise ValueError(f"x: expected shape (*, *), got {tuple(x.shape)}")
    row_count, width = x.shape
    group_height, group_width = group or (max(row_count, 1), max(width, 1))
    block_counts = (-(-row_count // group_height), -(-width // group_width)) if group else (1, 1)
    padded_x = torch.nn.functional.pad(
        x.float(), (0, block_counts[1] * group_width - width, 0, block_counts[0] * group_height - row_count)
    )
    group_values = padded_x.view(block_counts[0], group_height, block_counts[1], group_width)
    group_max = group_values.abs().amax(dim=(1, 3), keepdim=True)
    group_scale = torch.where(group_max > 0, (group_max / E4M3_MAX).clamp(min=MIN_SCALE), 1.0)
    scaled_values = (group_values / group_scale).clamp(-E4M3_MAX, E4M3_MAX).view(padded_x.shape)[:row_count, :width]
    scale_grid = group_scale.view(block_counts)
    return scaled_values.to(E4M3).contiguous(), scale_grid if group else scale_grid.reshape(())


def dequantize_fp8(values: torch.Tensor, scale: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """Returns values * scale in fp64, (R, C). scale: one element, or (ceil(R / rows), ceil(C / columns))."""
    if scale.ndim < 2:
        return values.double() * scale.double()
    row_count, width = values.shape
    scale_matrix = scale.double().repeat_interleave(group[0], 0)[:row_count].repeat_interleave(group[1], 1)[:, :width]
    return values.double() * scale_matrix


def gemm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Returns `(a_scale * a) @ (b_scale * b) + bias` in fp64, (M, N).

    a: (M, K) e4m3; b: (K, N) e4m3; bias: (N,) bf16. The fp32 scales have one element each, or are (M, ceil(K / 128))
    and (ceil(K / 128), ceil(N / 128)). `fast_accum` lets a kernel sum all of K in Hopper's short fp8 accumulator. The
    reference ignores it.
    """
    CONTRACT.check({"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "bias": bias})
    product = dequantize_fp8(a, a_scale, (1, GROUP_SIZE)) @ dequantize_fp8(b, b_scale, (GROUP_SIZE, GROUP_SIZE))
    return product if bias is None else product + bias.double()


def rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` unless both scales have one element, or both have one element per block."""
    if arguments["a_scale"].ndim == 2:
        group_count = -(-dims["K"] // GROUP_SIZE)
        check_shape("a_scale", arguments["a_scale"], dims["M"], group_count)
        check_shape("b_scale", arguments["b_scale"], group_count, -(-dims["N"] // GROUP_SIZE))
        return
    for name in ("a_scale", "b_scale"):
        if arguments[name].ndim > 1 or arguments[name].numel() != 1:
            raise ValueError(f"{name}: expected one element, shape () or (1,), got {tuple(arguments[name].shape)}")


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes normal operands and quantises them. `b` is first scaled by 1/sqrt(K), so that `a @ b` is of order one.

    The operands are always e4m3. Block scales of `a` are stored as (K/128, M), as cuBLAS and DeepGEMM need."""
    return _inputs(case, scheme, device, seed)


def _inputs(case: Case, scheme: Scheme, device: torch.device, seed: int, planted_k: int | None = None) -> Inputs:
    M, N, K, scale_kind = int(case["M"]), int(case["N"]), int(case["K"]), case["scales"]
    if scale_kind not in ("tensor", "block"):
        raise ValueError(f"scales: expected tensor or block, got {scale_kind!r}")
    bias = randn(N, dtype=torch.bfloat16, device=device, seed=seed + 2) if case["bias"] else None
    if torch.device(device).type == "meta":
        a, weight, a_scale, b_scale = _meta(M, N, K, scale_kind == "block")
    else:
        a_values = randn(M, K, dtype=torch.float32, device=device, seed=seed)
        b_values = randn(N, K, dtype=torch.float32, device=device, seed=seed + 1, scale=max(K, 1) ** -0.5)
        if planted_k is not None:
            a_values[:, planted_k] *= PLANTED_VALUE
            b_values[:, planted_k] *= PLANTED_VALUE
        is_block_scaled = scale_kind == "block"
        a, a_scale = quantize_fp8(a_values, (1, GROUP_SIZE) if is_block_scaled else None)
        weight, b_scale = quantize_fp8(b_values, (GROUP_SIZE, GROUP_SIZE) if is_block_scaled else None)
    if scale_kind == "block":
        a_scale = a_scale.mT.contiguous().mT
    inputs: Inputs = {"a": a, "b": weight.mT, "a_scale": a_scale, "b_scale": b_scale.mT if b_scale.ndim else b_scale}
    inputs["bias"] = bias
    if case.get("fast_accum"):
        inputs["fast_accum"] = True
    return inputs


def _meta(M: int, N: int, K: int, block: bool) -> tuple[torch.Tensor, ...]:
    group_count = -(-K // GROUP_SIZE)
    shapes = ((M, K), (N, K), (M, group_count) if block else (), (-(-N // GROUP_SIZE), group_count) if block else ())
    dtypes = (E4M3, E4M3, torch.float32, torch.float32)
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True))


def cost(args: Arguments) -> Cost:
    """Returns the cost: 2 M N K tensor-core FLOPs in e4m3. A bias needs one add per output element. Each tensor is read
    or written once.

    Multiplications by scales are not counted, because they need no separate pass over the outputs."""
    (M, K), N = args.a.shape, args.b.shape[1]
    return Cost(
        read_bytes=nbytes(args.a, args.b, args.a_scale, args.b_scale, args.bias),
        write_bytes=M * N * torch.bfloat16.itemsize,
        tensor_flops={"fp8_e4m3": 2.0 * M * N * K},
        vector_flops=float(M * N) if args.bias is not None else 0.0,
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of each output value:

        c * u * sqrt(K) * (|A| |B| + |bias|)  +  n * 3 * 2**-13 * (|A B| + sqrt((A*A) (B*B)))
            +  u_out * |ref|  +  half a subnormal

    The first term is the error of fp32 sums, as in `gemm`: u = 2**-24, c = 4. A and B are dequantised. Quantisation
    adds no error, because the kernel gets e4m3 operands. u_out is the unit roundoff of the output.

    The second term is the error of Hopper's accumulator, which keeps 13 bits after the leading bit. One instruction
    sums over 32 values of K and makes three errors of up to about 2**-13. It truncates the accumulator, the products
    and the result. The errors are relative to a partial sum, which has the size |A B| + sqrt((A*A) (B*B)), as in a
    random walk.

    n is the number of instructions whose sum stays in the accumulator. It is at most 4, because fp32 adds the sum after
    every four instructions. With `fast_accum`, n is K / 32.

    In a model of the accumulator with K = 128, the sum loses up to 7 * 2**-13 if one k dominates. Otherwise it loses up
    to 2.6 * 2**-13."""
    a = dequantize_fp8(inputs["a"], inputs["a_scale"], (1, GROUP_SIZE))
    b = dequantize_fp8(inputs["b"], inputs["b_scale"], (GROUP_SIZE, GROUP_SIZE))
    K = a.shape[1]
    sum_size = a.abs() @ b.abs()
    product = oracle[0]
    if inputs["bias"] is not None:
        sum_size = sum_size + inputs["bias"].double().abs()
        product = product - inputs["bias"].double()
    chained_k = K if inputs.get("fast_accum") else min(K, K_PER_PROMOTION)
    truncation_error = TRUNCATIONS_PER_INSTRUCTION * -(-chained_k // INSTRUCTION_K) * TRUNCATION_ERROR
    error_limit = ACCUMULATION_FACTOR * FP32_ROUNDOFF * max(K, 1) ** 0.5 * sum_size
    error_limit = error_limit + truncation_error * (product.abs() + (a.square() @ b.square()).sqrt())
    subnormal_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    return (error_limit + scheme.unit_roundoff * oracle[0].abs() + subnormal_error,)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one dominant k at each tile edge in K. Its values are set before quantisation."""
    K = int(case["K"])
    for k in sorted({k for k in (*PLANTED_K, K - 1) if 0 <= k < K}):
        yield f"k={k}", _inputs(case, scheme, device, seed, planted_k=k)


def _cases(pairs: tuple[tuple[int, int], ...], *M_values: int, scales: str = "block", **more: bool) -> tuple[Case, ...]:
    return tuple(Case(M=M, N=N, K=K, scales=scales, bias=False, **more) for M in M_values for N, K in pairs)


SMOLLM2_135M_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
QWEN3_0_6B_SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
LLAMA3_8B_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
DEEPSEEK_V3_SHAPES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
"""The sizes (N, K) of the dense products of DeepSeek-V3 for which DeepGEMM publishes figures."""

CONTRACT = Contract(
    {
        "a": Argument("M K", (E4M3,), "any"),
        "b": Argument("K N", (E4M3,), "any"),
        "a_scale": Argument(ANY_SHAPE, (torch.float32,), "any"),
        "b_scale": Argument(ANY_SHAPE, (torch.float32,), "any"),
        "bias": Argument("N", (torch.bfloat16,), optional=True),
    },
    {"c": Result("M N", torch.bfloat16)},
    rules=rules,
    scheme=lambda arguments: "fp8_e4m3",
)
SPEC = OpSpec(
    name="gemm_fp8",
    reference=gemm_fp8,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("c",),
    cases={
        "smoke": (
            # The first case is one that every kernel accepts.
            Case(M=48, N=80, K=160, scales="tensor", bias=True, fast_accum=True),
            Case(M=32, N=96, K=256, scales="tensor", bias=False),
            Case(M=64, N=144, K=208, scales="block", bias=True),
        ),
        "edge": (
            Case(M=1, N=1, K=1, scales="tensor", bias=False),
            Case(M=17, N=65, K=33, scales="block", bias=True),
            # TMA needs rows that are multiples of 16 bytes; otherwise the dimensions fit no whole tiles.
            Case(M=1, N=131, K=128, scales="block", bias=True),
            Case(M=65, N=31, K=144, scales="tensor", bias=False),
            Case(M=129, N=1, K=16, scales="block", bias=False),
            Case(M=127, N=257, K=400, scales="block", bias=True),
            Case(M=127, N=133, K=272, scales="tensor", bias=True, fast_accum=True),
            Case(M=257, N=136, K=272, scales="tensor", bias=True),
        ),
        # One layer: q|k|v in one product, o, gate|up in one product, down.
        "smollm2_135m": _cases(SMOLLM2_135M_SHAPES, 16),
        "qwen3_0_6b": _cases(QWEN3_0_6B_SHAPES, 16, 512),
        "llama3_8b": (
            *_cases(LLAMA3_8B_SHAPES, 1, 16, 2048),
            *_cases(LLAMA3_8B_SHAPES, 2048, scales="tensor"),
            *_cases(((28672, 4096),), 2048, scales="tensor", fast_accum=True),
        ),
        "deepseek_v3": _cases(DEEPSEEK_V3_SHAPES, 64, 128, 4096),
        # The short accumulator loses most at the largest K.
        "fast_accum": _cases((*LLAMA3_8B_SHAPES, (4096, 16384)), 2048, scales="tensor", fast_accum=True),
    },
    wrong={
        "the last k is left out": without_last_k,
        "the first scale of a for all": lambda of: {
            "a_scale": torch.full_like(of.a_scale, float(of.a_scale.flatten()[0]))
        },
        "the first scale of b for all": lambda of: {
            "b_scale": torch.full_like(of.b_scale, float(of.b_scale.flatten()[0]))
        },
    },
    tolerance=tolerance,
    planted=planted,
    schemes=("fp8_e4m3",),
    optional={"fast_accum": False},
    prepared="b",
    domain=Domain(
        {
            "M": Sizes(1, 5_000, empty=True),
            "N": Sizes(1, 300_000, model="intermediate hidden vocab"),
            "K": Sizes(1, 60_000, model="hidden intermediate"),
            "scales": ("tensor", "block"),
            "bias": (False, True),
            "fast_accum": (False, True),
        },
        Case,
    ),
)
