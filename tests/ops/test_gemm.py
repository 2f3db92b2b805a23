"""gemm: a residual without a bias, packed weights, and the arguments of QuACK."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, assert_right, each, here, refuses

from rooflab.kernels.gemm.packed import pack
from rooflab.kernels.registry import Kernel, get_kernel
from rooflab.reference.gemm import SPEC
from rooflab.reference.spec import SCHEMES, Case

WITH_RESIDUAL = [kernel for kernel in here("gemm") if kernel.prepare is None and "residual" in kernel.accepted]
BF16 = SCHEMES["bf16"]


@each(WITH_RESIDUAL)
def test_a_residual_alone_is_added_and_nothing_between_the_rows_is_read(kernel: Kernel) -> None:
    inputs = SPEC.make_inputs(Case(M=40, N=24, K=136, layout="NT", bias=False, residual=True), SCHEMES["fp16"], CPU, 0)
    wide = torch.full((40, 160), torch.nan, dtype=torch.float16)
    inputs["a"] = wide[:, :136].copy_(inputs["a"])
    assert_right(SPEC, kernel(**inputs), inputs, SCHEMES["fp16"])


def test_a_packed_weight_stands_for_its_weight_and_leaves_it_alone() -> None:
    weight, a = torch.randn(6, 4), torch.eye(4)
    before, packed = weight.clone(), pack(weight.mT)
    weight.zero_()
    assert (packed.shape, packed.nbytes) == ((4, 6), 96)
    torch.testing.assert_close(get_kernel("gemm", "packed")(a=a, b=packed), before.mT)
    assert get_kernel("gemm", "packed")(a=a[:0], b=packed).shape == (0, 6)


def test_packed_refuses_what_it_cannot_take() -> None:
    a, b = torch.ones(2, 4), torch.ones(4, 3)
    changes = [
        ({"b": b}, "b: expected a weight packed by this kernel's prepare, got Tensor"),
        ({"a": torch.ones(2, 5)}, r"b: expected shape \(K=5, N\), got \(4, 3\)"),
        ({"a": a.bfloat16()}, "b: expected a weight packed by .* torch.bfloat16, got torch.float32"),
    ]
    refuses(get_kernel("gemm", "packed").fn, lambda: {"a": a, "b": pack(b)}, changes)
    refuses(pack, lambda: {"b": b.half()}, [({}, "b: expected fp32 or bf16, .*, got torch.float16")])


def product(A, B, *C, out, bias=None):
    """`quack.gemm_interface.gemm`, and `gemm_add`, where C has its place before `out`."""
    out.copy_(A.float() @ B.float() + sum(addend.float() for addend in (*C, bias) if addend is not None))


@pytest.mark.parametrize(
    ("layout", "bias", "residual"), [("NN", False, False), ("NT", True, False), ("TN", False, True), ("NT", True, True)]
)
def test_what_quack_is_given(monkeypatch, layout: str, bias: bool, residual: bool) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace(gemm=product, gemm_add=product))
    case = Case(M=24, N=40, K=64, layout=layout, bias=bias, residual=residual)
    inputs = SPEC.make_inputs(case, BF16, CPU, 0)
    wide = torch.full((24, 48), 7.0, dtype=torch.bfloat16)
    found = get_kernel("gemm", "quack")(**inputs, out=wide[:, :40])
    assert_right(SPEC, found, inputs, BF16)
    assert found.data_ptr() == wide.data_ptr() and bool((wide[:, 40:] == 7.0).all())
