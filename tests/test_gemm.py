"""gemm: values by hand, layouts and views, refusals, packed weights, what its tolerance rejects, what QuACK gets."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rooflab.kernels.gemm.packed import PackedWeight, pack
from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.gemm import SPEC
from rooflab.reference.spec import SCHEMES, Case

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in kernels("gemm").values() if kernel.why_not_here(CPU) is None]
by_id = lambda kernel: kernel.name


def takes(kernel: Kernel, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the kernel is for such operands; the rungs that are not have tests of their own."""
    return kernel.why_not_args({"a": a, "b": kernel.prepare(b) if kernel.prepare else b}) is None


# Of any size and in fp32, which TMA rungs are not.
KERNELS = [kernel for kernel in KERNELS if takes(kernel, torch.ones(3, 5), torch.ones(5, 3))]
UNPACKED = [kernel for kernel in KERNELS if kernel.prepare is None]
TRITON = [kernel for kernel in UNPACKED if kernel.backend == "triton"]


def call(kernel: Kernel, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return kernel(a=a, b=kernel.prepare(b) if kernel.prepare else b, bias=bias)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_values_by_hand(kernel: Kernel) -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    b = torch.tensor([[1.0, -1.0], [10.0, 0.5]])
    assert call(kernel, a, b).tolist() == [[21.0, 0.0], [43.0, -1.0], [65.0, -2.0]]
    bias = torch.tensor([0.25, -100.0])
    assert call(kernel, a, b, bias).tolist() == [[21.25, -100.0], [43.25, -101.0], [65.25, -102.0]]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_empty_sizes(kernel: Kernel) -> None:
    assert call(kernel, torch.ones(0, 4), torch.ones(4, 3)).shape == (0, 3)
    if kernel.prepare is None:
        bias = torch.tensor([1.0, 2.0, 3.0])
        assert call(kernel, torch.ones(2, 0), torch.ones(0, 3), bias).tolist() == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_padded_rows_and_columns_are_not_read(kernel: Kernel) -> None:
    """Views into wider buffers whose rest is NaN: a tile that reads past an edge shows."""
    wide_a = torch.full((20, 40), torch.nan)
    wide_b = torch.full((40, 40), torch.nan)
    a, b = wide_a[:17, :33], wide_b[:33, :19]
    a.copy_(torch.randn(17, 33))
    b.copy_(torch.randn(33, 19))
    torch.testing.assert_close(call(kernel, a, b), (a.double() @ b.double()).float())


@pytest.mark.parametrize("kernel", UNPACKED, ids=by_id)
def test_out_is_written_and_nothing_beside_it(kernel: Kernel) -> None:
    buffer = torch.full((6, 9), 7.0)
    out = buffer[1:4, 2:7]
    result = kernel(a=torch.ones(3, 8), b=torch.ones(8, 5), out=out)
    assert result.data_ptr() == out.data_ptr()
    assert (out == 8.0).all()
    assert int((buffer == 7.0).sum()) == 6 * 9 - 3 * 5


@pytest.mark.parametrize("kernel", UNPACKED, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"a": torch.ones(4)}, r"a: expected shape \(\*, \*\), got \(4,\)"),
        ({"b": torch.ones(5, 3)}, r"b: expected shape \(4, \*\), got \(5, 3\)"),
        ({"b": torch.ones(4, 3, dtype=torch.float16)}, "b: expected torch.float32, got torch.float16"),
        ({"a": torch.ones(2, 4, dtype=torch.int32)}, "a: expected torch.float32 or .*, got torch.int32"),
        ({"bias": torch.ones(4)}, r"bias: expected shape \(3\), got \(4,\)"),
        ({"bias": torch.ones(6)[::2]}, "bias: expected stride 1"),
        ({"out": torch.ones(3, 2)}, r"out: expected shape \(2, 3\), got \(3, 2\)"),
        ({"out": torch.ones(2, 3, dtype=torch.float16)}, "out: expected torch.float32"),
        ({"out": torch.ones(3, 2).mT}, "out: expected stride 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel(**{"a": torch.ones(2, 4), "b": torch.ones(4, 3), **change})


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are."""
    a = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 16), (2**30, 1))
    a.copy_(torch.arange(48).view(3, 16))
    expected = [[float(row.sum())] for row in a]
    assert kernel(a=a, b=torch.ones(16, 1, dtype=torch.float16)).tolist() == expected
    assert kernel(a=torch.ones(1, 16, dtype=torch.float16), b=a.mT).tolist() == [[row[0] for row in expected]]


def test_packed_weight_stands_for_its_weight() -> None:
    weight = torch.randn(7, 5, dtype=torch.bfloat16)
    packed = pack(weight.mT)
    assert packed.shape == (5, 7)
    assert packed.nbytes == 70
    assert get_kernel("gemm", "packed").why_not_args({"a": torch.ones(1, 5, dtype=torch.bfloat16), "b": packed}) is None


def test_packed_refuses_what_it_cannot_take() -> None:
    kernel = get_kernel("gemm", "packed")
    a, b = torch.ones(2, 4), torch.ones(4, 3)
    with pytest.raises(ValueError, match="b: expected a weight packed by this kernel's prepare, got Tensor"):
        kernel(a=a, b=b)
    with pytest.raises(ValueError, match=r"a: expected shape \(\*, 4\), got \(2, 5\)"):
        kernel(a=torch.ones(2, 5), b=pack(b))
    with pytest.raises(ValueError, match="a: expected torch.float32, got torch.bfloat16"):
        kernel(a=a.bfloat16(), b=pack(b))
    with pytest.raises(ValueError, match=r"bias: expected shape \(3\), got \(2,\)"):
        kernel(a=a, b=pack(b), bias=torch.ones(2))
    with pytest.raises(ValueError, match="b: oneDNN packs fp32 and bf16 here, got torch.float16"):
        pack(b.half())
    reason = kernel.why_not_args({"a": a.half(), "b": b.half()}).reason
    assert reason == "gemm/packed: oneDNN packs fp32 and bf16 here, got torch.float16"
    assert (
        str(kernel.why_not_args({"a": a, "b": b, "out": torch.ones(2, 3)})) == "UNSUPPORTED: gemm/packed has no 'out'"
    )


def test_packing_leaves_the_weight_alone() -> None:
    weight = torch.randn(6, 4)
    before = weight.clone()
    packed = pack(weight.mT)
    weight.zero_()
    assert isinstance(packed, PackedWeight)
    result = get_kernel("gemm", "packed")(a=torch.eye(4), b=packed)
    torch.testing.assert_close(result, before.mT)


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_dropped_k_is_rejected(scheme: str) -> None:
    """At every planted k, a product without that k lies outside the tolerance."""
    case = Case(M=8, N=8, K=130, layout="NN", bias=False)
    labels = []
    for label, inputs in SPEC.planted(case, SCHEMES[scheme], CPU, 0):
        k = int(label.removeprefix("k="))
        wrong = {**inputs, "a": inputs["a"].index_fill(1, torch.tensor([k]), 0.0)}
        stats = SPEC.judge(SPEC.oracle(wrong), SPEC.oracle(inputs), inputs, SCHEMES[scheme])
        assert not stats[0].passed
        labels.append(k)
    assert labels == [0, 15, 16, 63, 64, 127, 128, 129]


def test_a_tf32_product_is_rejected() -> None:
    """Ten mantissa bits in place of 23 must not pass as fp32."""
    case, scheme = Case(M=16, N=16, K=64, layout="NN", bias=False), SCHEMES["fp32"]
    inputs = SPEC.make_inputs(case, scheme, CPU, 0)
    rounded = {name: (inputs[name].view(torch.int32) & ~0x1FFF).view(torch.float32) for name in ("a", "b")}
    stats = SPEC.judge(SPEC.oracle({**inputs, **rounded}), SPEC.oracle(inputs), inputs, scheme)
    assert not stats[0].passed


def test_cost_counts_each_operand_once() -> None:
    case = Case(M=4096, N=1024, K=512, layout="NT", bias=True)
    cost = SPEC.cost(**SPEC.make_inputs(case, SCHEMES["bf16"], torch.device("meta"), 0))
    assert cost.tensor_flops == {"bf16": 2 * 4096 * 1024 * 512}
    assert cost.read_bytes == 2 * (4096 * 512 + 512 * 1024 + 1024)
    assert cost.write_bytes == 2 * 4096 * 1024
    assert cost.vector_flops == 4096 * 1024


def test_traffic_falls_from_naive_to_tensor_core_and_to_tma() -> None:
    case = Case(M=2048, N=4096, K=4096, layout="NT", bias=False)
    inputs = SPEC.make_inputs(case, SCHEMES["bf16"], torch.device("meta"), 0)
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


def test_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout: expected NN, NT or TN, got 'TT'"):
        SPEC.make_inputs(Case(M=1, N=1, K=1, layout="TT", bias=False), SCHEMES["fp32"], CPU, 0)


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


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize(("bias", "residual"), [(False, False), (True, False), (False, True), (True, True)])
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
    bias, residual = torch.full((8,), 0.5).half(), torch.ones(3, 8).half()
    found = fn(torch.ones(3, 0).half(), torch.ones(0, 8).half(), bias, residual=residual)
    assert found.tolist() == [[1.5] * 8] * 3
    assert fn(torch.ones(0, 8).half(), torch.ones(8, 8).half()).shape == (0, 8)


def test_what_quack_refuses(quack: Kernel) -> None:
    for changes, message in [
        ({"a": torch.ones(16, 16), "b": torch.ones(16, 16)}, "a: expected torch.float16 or torch.bfloat16, got"),
        ({"a": torch.ones(16, 20).half()[:, :16]}, "a: expected an address and row stride of whole 16 bytes"),
        ({"a": torch.ones(16, 24).half()[:, 4:20]}, "a: expected an address .* got address % 16 = 8"),
        ({"b": torch.ones(16, 32).half()[:, ::2]}, "b: expected an address .* and strides .32, 2."),
        ({"b": torch.ones(12, 16).half().mT}, "b: expected N of whole 16 bytes, got 12 columns"),
        ({"residual": torch.ones(16, 20).half()[:, :16]}, "residual: expected an address and row stride"),
        ({"out": torch.ones(16, 20).half()[:, :16]}, "out: expected an address and row stride"),
        ({"b": torch.ones(8, 16).half()}, r"b: expected shape \(16, \*\)"),
        ({"bias": torch.ones(8).half()}, r"bias: expected shape \(16\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            quack.fn(**{"a": torch.ones(16, 16).half(), "b": torch.ones(16, 16).half(), **changes})


def test_it_is_refused_by_name_where_it_is_not_installed_or_cannot() -> None:
    kernel = get_kernel("gemm", "quack")
    assert kernel.role == "peer" and kernel.min_sm == 90
    assert str(kernel.why_not_here(torch.device("cpu"))) in (
        "UNAVAILABLE: quack is not installed", "UNSUPPORTED: needs a CUDA device"
    )  # fmt: skip
    assert kernel.why_not_args(given_to_quack(device="meta")) is None
    assert "has no 'precision'" in str(kernel.why_not_args(given_to_quack(QUACK, "tf32")))
    least = get_kernel("gemm", "library").traffic_of(given_to_quack(QUACK, device="meta"))
    assert kernel.traffic_of(given_to_quack(QUACK, device="meta")) == least
