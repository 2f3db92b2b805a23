"""gemm/quack: what QuACK is given, by a module that stands for its own, and what the adapter refuses."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rooflab.kernels.registry import Kernel, get_kernel
from rooflab.reference.gemm import SPEC
from rooflab.reference.spec import SCHEMES, Case

BF16 = SCHEMES["bf16"]
CASE = Case(M=24, N=40, K=64, layout="NT", bias=True, residual=True)


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


def inputs_of(case: Case = CASE, scheme: str = "bf16", device: str = "cpu") -> dict[str, torch.Tensor]:
    made = SPEC.make_inputs(case, SCHEMES[scheme], torch.device(device), 0)
    return {name: value for name, value in made.items() if value is not None}


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, False), (False, True), (True, True)])
def test_what_quack_is_given(quack: Kernel, layout: str, bias: bool, residual: bool) -> None:
    inputs = inputs_of(CASE.but(layout=layout, bias=bias, residual=residual))
    wide = torch.full((24, 48), 7.0, dtype=torch.bfloat16)
    found = quack(**inputs, out=wide[:, :40])
    full = {"bias": None, **inputs}
    assert SPEC.judge((found,), SPEC.oracle(full), full, BF16)[0].passed
    assert found.data_ptr() == wide.data_ptr() and bool((wide[:, 40:] == 7.0).all())
    assert torch.equal(quack(**inputs), found)


def test_without_work_quack_is_not_called(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace())
    fn = get_kernel("gemm", "quack").fn
    bias, residual = torch.full((8,), 0.5).half(), torch.ones(3, 8).half()
    found = fn(torch.ones(3, 0).half(), torch.ones(0, 8).half(), bias, residual=residual)
    assert found.tolist() == [[1.5] * 8] * 3
    assert fn(torch.ones(0, 8).half(), torch.ones(8, 8).half()).shape == (0, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.ones(16, 16), "b": torch.ones(16, 16)}, "a: expected torch.float16 or torch.bfloat16, got"),
        ({"a": torch.ones(16, 20).half()[:, :16]}, "a: expected an address and row stride of whole 16 bytes"),
        ({"a": torch.ones(16, 24).half()[:, 4:20]}, "a: expected an address .* got address % 16 = 8"),
        ({"b": torch.ones(16, 32).half()[:, ::2]}, "b: expected an address .* and strides .32, 2."),
        ({"b": torch.ones(12, 16).half().mT}, "b: expected N of whole 16 bytes, got 12 columns"),
        ({"residual": torch.ones(16, 20).half()[:, :16]}, "residual: expected an address and row stride"),
        ({"out": torch.ones(16, 20).half()[:, :16]}, "out: expected an address and row stride"),
        ({"b": torch.ones(8, 16).half()}, r"b: expected shape \(16, \*\)"),
        ({"bias": torch.ones(8).half()}, r"bias: expected shape \(16\)"),
    ],
)
def test_refusals(quack: Kernel, changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quack.fn(**{"a": torch.ones(16, 16).half(), "b": torch.ones(16, 16).half(), **changes})


def test_it_is_refused_by_name_where_it_is_not_installed_or_cannot() -> None:
    kernel = get_kernel("gemm", "quack")
    assert kernel.role == "peer" and kernel.min_sm == 90
    assert str(kernel.why_not_here(torch.device("cpu"))) in (
        "UNAVAILABLE: quack is not installed", "UNSUPPORTED: needs a CUDA device"
    )  # fmt: skip
    assert kernel.why_not_args(inputs_of(device="meta")) is None
    assert "has no 'precision'" in str(kernel.why_not_args(inputs_of(CASE, "tf32")))
    least = get_kernel("gemm", "library").traffic_of(inputs_of(CASE, device="meta"))
    assert kernel.traffic_of(inputs_of(CASE, device="meta")) == least
