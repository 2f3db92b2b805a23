"""Probes of torch's CPU products: both answers of each probe, on any machine, and what kernels do with the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rooflab.kernels._torch_cpu import reads_behind_rows, scaled_mm_writes_between_rows, why_not_padded_rows
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES

BF16 = torch.bfloat16
SCALED_MM = torch._scaled_mm


@pytest.fixture(autouse=True)
def ask_anew() -> Iterator[Any]:
    """Each test's probes see the torch that the test has made, and later tests see the real one."""

    def forget() -> None:
        for probe in (reads_behind_rows, scaled_mm_writes_between_rows):
            probe.cache_clear()

    forget()
    yield forget
    forget()


def mm_like_amx(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The product of 16-bit operands as AMX's kernels compute it: rows of `a` are read up to a multiple of 32."""
    K = a.shape[1]
    product = a.float() @ b.float()
    if a.dtype != torch.float32 and a.shape[0] > 16 and K % 32 and a.stride(0) > K:
        read = min(a.stride(0) - K, -K % 32)
        behind = torch.as_strided(a, (a.shape[0], read), a.stride(), a.storage_offset() + K)
        product += (behind.float() * 0).sum(1, keepdim=True)
    return product.to(a.dtype) if out is None else out.copy_(product)


def mm_as_it_should_be(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def scaled_mm_like_amx(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: object) -> torch.Tensor:
    """Writes the rows of `out` one behind the other, whatever its row stride is."""
    out = options.pop("out", None)
    result = ((a.float() * scales[0]) @ (b.float() * scales[1])).to(BF16)
    if not isinstance(out, torch.Tensor):
        return result
    out.as_strided(out.shape, (out.shape[1], 1)).copy_(result)
    return out


def padded(rows: int, columns: int, more: int = 7) -> torch.Tensor:
    wide = torch.full((rows, columns + more), torch.nan, dtype=BF16)
    wide[:, :columns] = torch.randn(rows, columns)
    return wide[:, :columns]


def test_only_a_torch_that_reads_behind_rows_is_refused_and_only_in_layouts_that_meet_it(monkeypatch, ask_anew):
    monkeypatch.setattr(torch, "mm", mm_as_it_should_be)
    assert not reads_behind_rows(BF16) and why_not_padded_rows(padded(17, 33)) is None
    ask_anew()
    monkeypatch.setattr(torch, "mm", mm_like_amx)
    assert reads_behind_rows(BF16)
    reason = str(why_not_padded_rows(a := padded(17, 33)))
    assert "expected rows that lie close together, got row stride 40 with K=33" in reason
    assert mm_like_amx(a, torch.randn(33, 9).to(BF16)).isnan().any()
    columns = torch.randn(33, 17).to(BF16).mT
    for right in (padded(16, 33), padded(17, 64), padded(17, 33).contiguous(), padded(17, 33).float(), columns):
        b = torch.randn(right.shape[1], 9).to(right.dtype)
        assert why_not_padded_rows(right) is None and torch.equal(mm_like_amx(right, b), mm_as_it_should_be(right, b))


def test_the_probe_says_of_this_cpu_what_it_does():
    right = []
    for rows, columns, wide in ((17, 33, 65), (64, 80, 48), (33, 17, 9)):
        a, b = padded(rows, columns), torch.randn(columns, wide).to(BF16)
        right.append(bool(torch.mm(a, b).isfinite().all()))
        assert right[-1] or why_not_padded_rows(a), "computed wrongly and not refused"
    assert reads_behind_rows(BF16) != all(right)


@pytest.mark.parametrize(
    "name",
    ["gemm/library", "gemm_silu_and_mul/naive", "gemm_silu_and_mul/library", "gemm_grouped/naive", "gemm_w8a16/naive"],
)
def test_kernels_refuse_what_torch_computes_wrongly(monkeypatch, name):
    monkeypatch.setattr(torch, "mm", mm_like_amx)
    kernel = get_kernel(*name.split("/"))
    spec, rows = get_op(kernel.op), {"T": 40, "top_k": 1} if kernel.op == "gemm_grouped" else {"M": 40}
    scheme = SCHEMES["bf16" if "bf16" in spec.schemes else spec.schemes[0]]
    inputs = spec.make_inputs(spec.cases["smoke"][0].but(**rows, K=40), scheme, torch.device("cpu"), 0)
    wrong = {**inputs, "a": padded(40, 40)}
    assert "read behind the end of its rows" in str(kernel.why_not_args(wrong))
    with pytest.raises(ValueError, match="read behind the end"):
        kernel(**wrong)
    assert kernel.why_not_args({**inputs, "a": padded(40, 40).contiguous()}) is None


def test_fp8_products_write_nothing_between_rows(monkeypatch, ask_anew):
    """Where torch takes padded outputs for dense ones, the launcher hands it none."""
    kernel = get_kernel("gemm_fp8", "library")
    a, b = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((32, 64), (48, 64)))
    one = torch.ones(())
    expected = SCALED_MM(a, b.mT, one, one, out_dtype=BF16)
    for call, writes in ((SCALED_MM, None), (scaled_mm_like_amx, True)):
        ask_anew()
        monkeypatch.setattr(torch, "_scaled_mm", call)
        assert writes is None or scaled_mm_writes_between_rows() == writes
        wide = torch.full((32, 60), 7.0, dtype=BF16)
        out = kernel(a=a, b=b.mT, a_scale=one, b_scale=one, out=wide[:, :48])
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        assert bool((wide[:, 48:] == 7).all())
