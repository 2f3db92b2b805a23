"""gemm: packed weights, cost and traffic, what QuACK gets."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, each, here, refuses

from rooflab.kernels.gemm.packed import PackedWeight, pack
from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.gemm import SPEC
from rooflab.reference.spec import SCHEMES, Case

UNPACKED = [kernel for kernel in kernels("gemm").values() if kernel.prepare is None and kernel.role != "peer"]
HERE = [kernel for kernel in UNPACKED if kernel in here("gemm")]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


@each([kernel for kernel in HERE if "residual" in inspect.signature(kernel.fn).parameters])
def test_a_residual_alone_is_added(kernel: Kernel) -> None:
    inputs = SPEC.make_inputs(Case(M=40, N=24, K=40, layout="NT", bias=False, residual=True), SCHEMES["fp16"], CPU, 0)
    assert SPEC.judge((kernel(**inputs),), SPEC.oracle(inputs), inputs, SCHEMES["fp16"])[0].passed


def test_a_packed_weight_stands_for_its_weight_and_leaves_it_alone() -> None:
    weight = torch.randn(6, 4)
    before, packed = weight.clone(), pack(weight.mT)
    weight.zero_()
    assert isinstance(packed, PackedWeight) and (packed.shape, packed.nbytes) == ((4, 6), 96)
    kernel, a = get_kernel("gemm", "packed"), torch.eye(4)
    assert kernel.why_not_args({"a": a, "b": packed}) is None
    torch.testing.assert_close(kernel(a=a, b=packed), before.mT)
    assert kernel(a=a[:0], b=packed).shape == (0, 6)


def test_packed_refuses_what_it_cannot_take() -> None:
    kernel = get_kernel("gemm", "packed")
    a, b = torch.ones(2, 4), torch.ones(4, 3)
    changes = [
        ({"b": b}, "b: expected a weight packed by this kernel's prepare, got Tensor"),
        ({"a": torch.ones(2, 5)}, r"b: expected shape \(K=5, N\), got \(4, 3\)"),
        ({"a": a.bfloat16()}, "b: expected a weight packed by .* torch.bfloat16, got torch.float32"),
    ]
    refuses(kernel.fn, lambda: {"a": a, "b": pack(b)}, changes)
    refuses(pack, lambda: {"b": b.half()}, [({}, "b: expected fp32 or bf16, .*, got torch.float16")])
    reason = kernel.why_not_args({"a": a.half(), "b": b.half()}).reason
    assert reason.startswith("gemm/packed: b: expected fp32 or bf16, which oneDNN packs here, got torch.float16; ")
    refusal = kernel.why_not_args({"a": a, "b": b, "out": torch.ones(2, 3)})
    assert str(refusal).startswith("UNSUPPORTED: gemm/packed has no 'out'; ")


QUACK = Case(M=24, N=40, K=64, layout="NT", bias=True, residual=True)


def plain_gemm(A, B, out=None, bias=None):
    """`quack.gemm_interface.gemm`, as far as it is called."""
    out.copy_(A.float() @ B.float() + (0 if bias is None else bias.float()))


def plain_gemm_add(A, B, C, out=None, bias=None):
    """`quack.gemm_interface.gemm_add`: C has its place before `out`."""
    out.copy_(A.float() @ B.float() + C.float() + (0 if bias is None else bias.float()))


@pytest.fixture
def quack(monkeypatch) -> Kernel:
    """The kernel, with a module in QuACK's place."""
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace(gemm=plain_gemm, gemm_add=plain_gemm_add))
    return get_kernel("gemm", "quack")


def given_to_quack(case: Case = QUACK, scheme: str = "bf16", device: str = "cpu") -> dict[str, torch.Tensor]:
    made = SPEC.make_inputs(case, SCHEMES[scheme], torch.device(device), 0)
    return {name: value for name, value in made.items() if value is not None}


@pytest.mark.parametrize(
    ("layout", "bias", "residual"), [("NN", False, False), ("NT", True, False), ("TN", False, True), ("NT", True, True)]
)
def test_what_quack_is_given(quack: Kernel, layout: str, bias: bool, residual: bool) -> None:
    inputs = given_to_quack(QUACK.but(layout=layout, bias=bias, residual=residual))
    wide = torch.full((24, 48), 7.0, dtype=torch.bfloat16)
    found = quack(**inputs, out=wide[:, :40])
    full = {"bias": None, **inputs}
    assert SPEC.judge((found,), SPEC.oracle(full), full, SCHEMES["bf16"])[0].passed
    assert found.data_ptr() == wide.data_ptr() and bool((wide[:, 40:] == 7.0).all())
    assert torch.equal(quack(**inputs), found)


def test_without_work_quack_is_not_called(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace())
    fn = get_kernel("gemm", "quack").fn
    bias, residual = torch.full((8,), 0.5).half(), ones(3, 8)
    found = fn(ones(3, 0), ones(0, 8), bias, residual=residual)
    assert found.tolist() == [[1.5] * 8] * 3
    assert fn(ones(0, 8), ones(8, 8)).shape == (0, 8)
