"""gemm: packed weights, cost and traffic, what QuACK gets."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from op_kernels import CPU, META, each, here, refuses

from rooflab.kernels.gemm.packed import PackedWeight, pack
from rooflab.kernels.registry import Kernel, get_kernel, get_op, kernels
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
    assert str(refusal).startswith("UNSUPPORTED: gemm/packed: it has no 'out'; ")


def test_traffic_falls_from_naive_to_tensor_core_and_to_tma() -> None:
    case = Case(M=2048, N=4096, K=4096, layout="NT", bias=False)
    inputs = SPEC.make_inputs(case, SCHEMES["bf16"], META, 0)
    inputs.pop("bias")
    naive, tensor_core, library = (
        get_kernel("gemm", name).traffic_of(inputs) for name in ("naive", "tensor_core", "library")
    )
    weight_bytes = 2 * 4096 * 4096
    assert naive.read_bytes - library.read_bytes == (2048 / 16 - 1) * weight_bytes
    assert tensor_core.read_bytes - library.read_bytes == (2048 / 1024 - 1) * weight_bytes
    assert get_kernel("gemm", "pipelined").traffic_of(inputs) == tensor_core
    for name in ("tma", "persistent", "warp_specialized", "cooperative"):
        assert get_kernel("gemm", name).traffic_of(inputs) == library, "a group holds 2048 rows"
    residual = torch.empty(2048, 4096, dtype=torch.bfloat16, device="meta")
    added = get_kernel("gemm", "tma").traffic_of({**inputs, "residual": residual})
    assert added.read_bytes - library.read_bytes == 2 * 2048 * 4096


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


def test_what_quack_refuses(quack: Kernel) -> None:
    changes = [
        ({"a": torch.ones(16, 16), "b": torch.ones(16, 16)}, "a: expected torch.float16 or torch.bfloat16, got"),
        ({"a": ones(16, 20)[:, :16]}, "a: expected an address and row stride of whole 16 bytes"),
        ({"a": ones(16, 24)[:, 4:20]}, "a: expected an address .* got address % 16 = 8"),
        ({"b": ones(16, 32)[:, ::2]}, "b: expected an address .* and strides .32, 2."),
        ({"b": ones(12, 16).mT}, "b: expected N of whole 16 bytes, got 12 columns"),
        ({"residual": ones(16, 20)[:, :16]}, "residual: expected an address and row stride"),
        ({"out": ones(16, 20)[:, :16]}, "out: expected an address and row stride"),
    ]
    refuses(quack.fn, lambda: {"a": ones(16, 16), "b": ones(16, 16)}, changes)


def test_it_is_refused_by_name_where_it_is_not_installed_or_cannot() -> None:
    kernel = get_kernel("gemm", "quack")
    assert kernel.role == "peer" and kernel.min_sm == 90
    assert str(kernel.why_not_here(CPU)) in (
        "UNAVAILABLE: quack is not installed", "UNSUPPORTED: needs a CUDA device"
    )  # fmt: skip
    assert kernel.why_not_args(given_to_quack(device="meta")) is None
    assert "has no 'precision'" in str(kernel.why_not_args(given_to_quack(QUACK, "tf32")))
    inputs = given_to_quack(QUACK, device="meta")
    assert get_kernel("gemm", "library").traffic_of(inputs) is None, "it refuses a residual beside a bias"
    least, said = get_op("gemm").cost_of(inputs), kernel.traffic_of(inputs)
    assert (said.read_bytes, said.write_bytes, said.launches) == (least.read_bytes, least.write_bytes, 1)
