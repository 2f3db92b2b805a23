"""gemm_grouped: multiplies the rows of each expert by the expert's matrix (mixture of experts).

The rows of A are sorted by expert (Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022).
`offsets` holds the index of each expert's first row. An expert may have no rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from rooflab.reference.contract import FLOATS, Argument, CallArguments, Contract, Dims, Result
from rooflab.reference.domain import Domain, Sizes
from rooflab.reference.gemm import without_last_k
from rooflab.reference.pages import offsets_of, turned
from rooflab.reference.rules import check_offsets
from rooflab.reference.spec import (
    DTYPE_NAMES,
    FP32_ROUNDOFF,
    Arguments,
    Case,
    Inputs,
    OpSpec,
    Outputs,
    Scalar,
    Scheme,
    nbytes,
    randn,
)
from rooflab.roofline.model import Cost

# A kernel that drops, repeats or misplaces one k fails at the edges of 16-, 64- and 128-wide tiles.
PLANTED_K = (0, 15, 16, 63, 64, 127, 128)
PLANTED_VALUE = 16.0
ACCUMULATION_FACTOR = 4.0


def _groups(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yields each expert with its range of rows. Skips the experts without rows."""
    row_offsets = offsets.tolist()
    for expert, (start_row, end_row) in enumerate(itertools.pairwise(row_offsets)):
        if end_row > start_row:
            yield expert, slice(start_row, end_row)


def gemm_grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns `out[s:t] = a[s:t] @ b[e]` in fp64 for each expert e, with s = offsets[e] and t = offsets[e + 1].

    a: (T, K), rows sorted by expert; b: (E, K, N); offsets: (E + 1,) int32, ascending from 0 to T; returns (T, N)."""
    dim_sizes = CONTRACT.check({"a": a, "b": b, "offsets": offsets})
    check_offsets("offsets", offsets, dim_sizes["T"])
    out = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64, device=a.device)
    for expert, expert_rows in _groups(offsets):
        out[expert_rows] = a[expert_rows].double() @ b[expert].double()
    return out


def rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if a row belongs to no expert."""
    if dims["T"] and not dims["E"]:
        raise ValueError(f"b: expected an expert for the {dims['T']} rows of a, got none")


def route(T: int, top_k: int, E: int, skew: float, seed: int) -> torch.Tensor:
    """Draws a random assignment of T rows to E experts, and returns the offsets (E + 1,) int32 on the CPU.

    Each of T / top_k tokens draws top_k different experts. The r-th most popular expert has the weight r**-skew. So
    skew 0 is a uniform router, and skew 1 is Zipf's law. Raises `ValueError` if top_k does not divide T or is not in 1
    to E."""
    if top_k < 1 or top_k > E or T % top_k:
        raise ValueError(f"top_k: expected a divisor of T={T} from 1 to E={E}, got {top_k}")
    generator = torch.Generator().manual_seed(seed)
    popularity_rank = torch.randperm(E, generator=generator)
    gumbel_noise = -torch.empty(T // top_k, E, dtype=torch.float64).exponential_(generator=generator).log()
    expert_scores = gumbel_noise - skew * torch.log(popularity_rank + 1.0)
    expert_ids = expert_scores.topk(top_k, dim=1).indices
    expert_row_counts = torch.bincount(expert_ids.flatten(), minlength=E)
    return torch.cat((torch.zeros(1, dtype=torch.int64), expert_row_counts.cumsum(0))).to(torch.int32)


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Makes random operands and offsets. `b` is a transposed view of (E, N, K) weights, scaled by 1/sqrt(K).

    The matrix of an expert without rows holds NaN, because no kernel needs to read this matrix."""
    T, top_k, E, N, K = (int(case[dim_name]) for dim_name in ("T", "top_k", "E", "N", "K"))
    device = torch.device(device)
    offsets = route(T, top_k, E, float(case["skew"]), seed + 2)
    a = randn(T, K, dtype=scheme.activation, device=device, seed=seed)
    weight = randn(E, N, K, dtype=scheme.weight, device=device, seed=seed + 1, scale=max(K, 1) ** -0.5)
    if device.type == "meta":
        return {"a": a, "b": weight.mT, "offsets": offsets}
    weight[(offsets.diff() == 0).to(device)] = torch.nan
    return {"a": a, "b": weight.mT, "offsets": offsets.to(device)}


def cost(args: Arguments) -> Cost:
    """Returns the cost: 2 T N K tensor-core FLOPs. `a` and the matrices of the experts that have rows are read once."""
    (T, K), N = args.a.shape, args.b.shape[2]
    expert_count = len(list(_groups(args.offsets)))
    return Cost(
        read_bytes=nbytes(args.a, args.offsets) + expert_count * K * N * args.b.element_size(),
        write_bytes=T * N * args.a.element_size(),
        tensor_flops={DTYPE_NAMES[args.a.dtype]: 2.0 * T * N * K},
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """Returns the tolerance of each output value, as in the op `gemm`:

        4 * 2**-24 * sqrt(K) * size  +  u_out * |ref|  +  half a subnormal

    `size` bounds the partial sums of the expert's product A B. With 16-bit inputs, `size` is |A| |B|. In fp32, it is
    |ref| + sqrt((A*A) (B*B)). u_out is the unit roundoff of the output dtype.
    """
    a, b = inputs["a"], inputs["b"]
    partial_sums = torch.zeros_like(oracle[0])
    for expert, expert_rows in _groups(inputs["offsets"]):
        expert_a, expert_b = a[expert_rows].double(), b[expert].double()
        if scheme.activation == torch.float32:
            partial_sums[expert_rows] = oracle[0][expert_rows].abs() + (expert_a.square() @ expert_b.square()).sqrt()
        else:
            partial_sums[expert_rows] = expert_a.abs() @ expert_b.abs()
    sum_error = ACCUMULATION_FACTOR * FP32_ROUNDOFF * max(a.shape[1], 1) ** 0.5 * partial_sums
    subnormal_error = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    return (sum_error + scheme.unit_roundoff * oracle[0].abs() + subnormal_error,)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """Yields adversarial inputs: one index k, at a tile edge in K, dominates the sum over all other k. Also yields very
    large first and last rows of every expert, to reveal a row that goes to the wrong expert or is stored twice."""
    K = int(case["K"])
    for k in sorted({k for k in (*PLANTED_K, K - 1) if 0 <= k < K}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, k] *= PLANTED_VALUE
        inputs["b"][:, k] *= PLANTED_VALUE
        yield f"k={k}", inputs
    inputs = make_inputs(case, scheme, device, seed)
    for _, expert_rows in _groups(inputs["offsets"]):
        inputs["a"][[expert_rows.start, expert_rows.stop - 1]] *= PLANTED_VALUE
    yield "edges of groups", inputs
    inputs = make_inputs(case, scheme, device, seed)
    row_counts = torch.zeros(int(case["E"]), dtype=torch.int64)
    row_counts[-1:], row_counts[len(row_counts) // 2] = min(int(case["T"]), 1), 0
    row_counts[len(row_counts) // 2] += int(case["T"]) - int(row_counts.sum())
    uneven_inputs = {"b": inputs["b"].nan_to_num(0.5), "offsets": offsets_of(row_counts).to(inputs["offsets"])}
    yield "uneven rows: one expert has all but one", {**inputs, **uneven_inputs}
    yield "groups in the other order", {**inputs, "b": inputs["b"].mT.flip(0).mT, "offsets": turned(inputs["offsets"])}


def _cases(E: int, top_k: int, pairs: tuple[tuple[int, int], ...], *tokens: int, skew: float = 0.0) -> tuple[Case, ...]:
    return tuple(
        Case(T=token_count * top_k, top_k=top_k, E=E, N=N, K=K, skew=skew) for token_count in tokens for N, K in pairs
    )


def _drawn(tokens: int, top_k: int, E: int, **values: Scalar) -> Case | None:
    """Makes a test case from random sizes. Returns None if making the routing would take about one second."""
    return Case(T=tokens * top_k, top_k=top_k, E=max(E, top_k), **values) if tokens * E <= 2**18 else None


MIXTRAL_SHAPES = ((28672, 4096), (4096, 14336))
QWEN3_DIMS = ((1536, 2048), (2048, 768))
"""The sizes (N, K) of Qwen3-30B's products: gate|up in one product, and down."""


def _first_rows_before(of: Arguments) -> Inputs:
    """Imitates a faulty kernel that computes the first row of each expert with the previous expert's weights."""
    new_offsets = of.offsets.clone()
    new_offsets[1:-1] = (new_offsets[1:-1] + 1).clamp(max=len(of.a))
    return {"offsets": new_offsets, "b": of.b.nan_to_num(1.0)}


CONTRACT = Contract(
    {
        "a": Argument("T K", FLOATS, "any"),
        "b": Argument("E K N", "a", "any"),
        "offsets": Argument("E+1", (torch.int32,), "contiguous"),
    },
    {"out": Result("T N", "a")},
    rules=rules,
    bounds=lambda arguments, dims: check_offsets("offsets", arguments["offsets"], dims["T"]),
)
SPEC = OpSpec(
    name="gemm_grouped",
    reference=gemm_grouped,
    contract=CONTRACT,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("out",),
    cases={
        "smoke": (Case(T=40, top_k=2, E=4, N=48, K=64, skew=0.0), Case(T=24, top_k=1, E=8, N=64, K=80, skew=1.0)),
        "edge": (
            Case(T=1, top_k=1, E=1, N=1, K=1, skew=0.0),
            Case(T=3, top_k=1, E=9, N=33, K=17, skew=0.0),  # most groups are empty, and the others have one row
            Case(T=6, top_k=1, E=6, N=24, K=40, skew=1.0),  # as many rows as groups, but not a row for each group
            Case(T=70, top_k=1, E=5, N=24, K=40, skew=100.0),  # one group has every row
            Case(T=150, top_k=2, E=3, N=65, K=130, skew=1.0),
            # TMA needs strides that are multiples of 16 bytes; otherwise the dimensions fit no whole tiles.
            Case(T=261, top_k=3, E=5, N=136, K=72, skew=1.0),
            Case(T=129, top_k=1, E=4, N=24, K=200, skew=100.0),
            Case(T=64, top_k=4, E=40, N=40, K=8, skew=0.5),
        ),
        "mixtral_8x7b": (*_cases(8, 2, MIXTRAL_SHAPES, 1, 16, 64, 2048), *_cases(8, 2, MIXTRAL_SHAPES, 2048, skew=1.0)),
        "qwen3_30b_a3b": (*_cases(128, 8, QWEN3_DIMS, 1, 16, 64, 2048), *_cases(128, 8, QWEN3_DIMS, 2048, skew=1.0)),
        # One group is a plain product: beside `gemm` it shows the price of looking for the expert.
        "smollm2_135m": _cases(1, 1, ((3072, 576), (576, 1536)), 1, 16, 512),
        "qwen3_0_6b": _cases(1, 1, ((6144, 1024), (1024, 3072)), 1, 16, 512),
        "llama3_8b": _cases(1, 1, ((28672, 4096), (4096, 14336)), 1, 16, 2048),
    },
    wrong={
        "the last k is left out": without_last_k,
        "the first row of an expert goes to the one before": _first_rows_before,
    },
    tolerance=tolerance,
    planted=planted,
    domain=Domain(
        {
            "tokens": Sizes(1, 10_000, empty=True),
            "top_k": (1, 2, 3, 8),
            "E": Sizes(1, 400, model="experts"),
            "N": Sizes(1, 5_000, model="expert_intermediate"),
            "K": Sizes(1, 5_000, model="hidden"),
            "skew": (0.0, 1.0, 100.0),
        },
        _drawn,
    ),
)
