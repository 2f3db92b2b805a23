"""Tests whether torch's matrix products on this CPU have known defects. Each test runs once per process.

torch 2.13.0 (oneDNN) gives wrong results for two memory layouts on Intel CPUs with AMX. The results are right on an AMD
EPYC with AVX-512, and on these Intel CPUs with `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`. A kernel here refuses such a
layout, or does not pass it to torch.
"""

from __future__ import annotations

from functools import cache

import torch

from rooflab.reference.spec import Arguments

MAX_NON_AMX_ROWS = 16
"""The most rows of `a` that torch reads correctly.  Products with 17 or more rows use AMX tiles."""
TILE_K = 32
"""The number of 16-bit values per row of an AMX tile.  torch reads the last tile in full even if K does not fill it."""


def why_not_padded_rows(a: torch.Tensor) -> str | None:
    """Returns why torch's CPU matrix products give a wrong result for `a` `[M, K]`, or None if the result is right.

    torch reads past the end of each row, up to a multiple of 32 values, and multiplies the extra values by 0. An extra
    value of NaN makes the result NaN. Rows without padding are safe."""
    if a.device.type != "cpu" or a.dtype not in (torch.bfloat16, torch.float16) or a.ndim != 2:
        return None
    M, K = a.shape
    if M <= MAX_NON_AMX_ROWS or K % TILE_K == 0 or a.stride(0) <= K or not reads_behind_rows(a.dtype):
        return None
    return (
        f"torch's products on this CPU read behind the end of its rows (a defect of their AMX kernels): expected rows "
        f"that lie close together, got row stride {a.stride(0)} with K={K}"
    )


def padded_rows_refused(inputs: Arguments) -> str | None:
    """Returns an error message if torch's CPU matrix products are wrong for the matrix `a`, or None if they are right.
    The cause of wrong results is padding between the rows of `a`. Kernels that pass `a` to torch refuse the call with
    this message."""
    refusal_reason = why_not_padded_rows(inputs.a)
    return f"a: {refusal_reason}" if refusal_reason else None


def check_rows(a: torch.Tensor) -> None:
    """Raises `ValueError` if torch's CPU matrix products would give a wrong result for `a` `[M, K]`."""
    refusal_reason = why_not_padded_rows(a)
    if refusal_reason:
        raise ValueError(f"a: {refusal_reason}")


@cache
def reads_behind_rows(dtype: torch.dtype) -> bool:
    """Returns whether `torch.mm` on this CPU reads the padding between the rows of its first operand."""
    M, N, K = 33, 65, 33
    padded_matrix = torch.full((M, K + 7), torch.nan, dtype=dtype)
    padded_matrix[:, :K] = 1
    test_product = torch.mm(padded_matrix[:, :K], torch.ones((K, N), dtype=dtype))
    return not bool((test_product == K).all())


@cache
def scaled_mm_writes_between_rows() -> bool:
    """Returns whether `torch._scaled_mm` on this CPU writes results into the padding between the rows of `out`."""
    M, N, K, padding_value = 32, 48, 64, 7.0
    a, b = (torch.ones(matrix_shape).to(torch.float8_e4m3fn) for matrix_shape in ((M, K), (N, K)))
    unit_scale = torch.ones(())
    padded_out = torch.full((M, 2 * N), padding_value, dtype=torch.bfloat16)
    torch._scaled_mm(a, b.mT, unit_scale, unit_scale, out_dtype=torch.bfloat16, out=padded_out[:, :N])
    return not bool((padded_out[:, :N] == K).all() and (padded_out[:, N:] == padding_value).all())
