"""gemm: C = A B + bias.

Cases name the operands' storage as BLAS does: `NN` both row-major, `NT` B as a transposed view of an (N, K) weight,
`TN` A as a transposed view of a (K, M) matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.reference.spec import DTYPE_NAMES, FP32_ROUNDOFF, Case, Inputs, OpSpec, Outputs, Scheme, nbytes, randn
from rooflab.roofline.model import Cost

# A kernel that drops, repeats or misplaces one k shows at the edges of 16-, 64- and 128-wide tiles.
PLANTED_K = (0, 15, 16, 63, 64, 127, 128)
ACCUMULATION_FACTOR = 4.0


def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a b + bias in fp64.  a: (M, K); b: (K, N); bias: (N,); returns (M, N)."""
    product = a.double() @ b.double()
    return product if bias is None else product + bias.double()


def make_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    """Random operands; b is scaled by 1/sqrt(K), so that the product is of order one at every K."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    layout = case["layout"]
    if layout not in ("NN", "NT", "TN"):
        raise ValueError(f"layout: expected NN, NT or TN, got {layout!r}")
    a_shape = (K, M) if layout == "TN" else (M, K)
    b_shape = (N, K) if layout == "NT" else (K, N)
    a = randn(*a_shape, dtype=scheme.activation, device=device, seed=seed)
    b = randn(*b_shape, dtype=scheme.weight, device=device, seed=seed + 1, scale=max(K, 1) ** -0.5)
    bias = randn(N, dtype=scheme.weight, device=device, seed=seed + 2) if case["bias"] else None
    return {"a": a.mT if layout == "TN" else a, "b": b.mT if layout == "NT" else b, "bias": bias}


def cost(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Cost:
    """2 M N K tensor-core FLOPs, one add per output where there is a bias; every operand moves once."""
    (M, K), N = a.shape, b.shape[1]
    return Cost(
        read_bytes=nbytes(a, b, bias),
        write_bytes=M * N * a.element_size(),
        tensor_flops={DTYPE_NAMES[a.dtype]: 2.0 * M * N * K},
        vector_flops=0.0 if bias is None else float(M * N),
    )


def tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    """c u_acc sqrt(K) (size of the partial sums + |bias|) + u_out |ref| + half a subnormal of the output.

    u_acc = 2**-24 is fp32's unit roundoff, because every scheme here accumulates in fp32. K rounding errors of random
    sign add up as sqrt(K), each relative to a partial sum; c = 4 leaves room for an unlucky walk. In 16 bits partial
    sums are taken at their worst, |A| |B|, because tensor cores truncate, and truncation has a sign. In fp32, where
    TF32 must not pass, they are a random walk's: |ref| + sqrt((A*A) (B*B)).
    """
    a, b, bias = inputs["a"], inputs["b"], inputs["bias"]
    if scheme.activation == torch.float32:
        magnitude = oracle[0].abs() + (a.double().square() @ b.double().square()).sqrt()
    else:
        magnitude = a.double().abs() @ b.double().abs()
    if bias is not None:
        magnitude += bias.double().abs()
    arithmetic = ACCUMULATION_FACTOR * FP32_ROUNDOFF * max(a.shape[1], 1) ** 0.5 * magnitude
    subnormal = torch.finfo(scheme.output).smallest_normal * scheme.unit_roundoff
    return (arithmetic + scheme.unit_roundoff * oracle[0].abs() + subnormal,)


def planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    """One k that outweighs all others together, at every tile edge that K reaches."""
    K = int(case["K"])
    for k in sorted({k for k in (*PLANTED_K, K - 1) if 0 <= k < K}):
        inputs = make_inputs(case, scheme, device, seed)
        inputs["a"][:, k] *= 16.0
        inputs["b"][k] *= 16.0
        yield f"k={k}", inputs


def _cases(pairs: tuple[tuple[int, int], ...], *M_values: int) -> tuple[Case, ...]:
    return tuple(Case(M=M, N=N, K=K, layout="NT", bias=False) for M in M_values for N, K in pairs)


SPEC = OpSpec(
    name="gemm",
    reference=gemm,
    make_inputs=make_inputs,
    cost=cost,
    outputs=("c",),
    cases={
        "smoke": (
            Case(M=32, N=96, K=64, layout="NT", bias=False),
            Case(M=64, N=48, K=80, layout="NN", bias=True),
        ),
        "edge": (
            Case(M=1, N=1, K=1, layout="NN", bias=False),
            Case(M=1, N=131, K=129, layout="NT", bias=True),
            Case(M=17, N=65, K=33, layout="NN", bias=True),
            Case(M=65, N=31, K=130, layout="TN", bias=False),
            Case(M=129, N=1, K=16, layout="NT", bias=False),
        ),
        # Per layer: q|k|v in one, o, gate|up in one, down; then the vocabulary, for the last position only.
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
    tolerance=tolerance,
    planted=planted,
    prepared="b",
)
