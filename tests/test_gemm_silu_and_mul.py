"""gemm_silu_and_mul: values by hand, views, refusals, what its tolerance rejects, and CTAs with several tiles."""

from __future__ import annotations

import math

import pytest
import torch

from rooflab.bench.emulate.calls import call
from rooflab.bench.predict.cases import Target
from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.gemm_silu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case

CPU, META = torch.device("cpu"), torch.device("meta")
KERNELS = [kernel for kernel in kernels("gemm_silu_and_mul").values() if kernel.why_not_here(CPU) is None]
TMA = [kernel for kernel in kernels("gemm_silu_and_mul").values() if kernel.min_sm == 90]
ANY_STRIDES = [kernel for kernel in KERNELS if kernel.min_sm is None]
by_id = lambda kernel: kernel.name


def weight(K: int, I: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2 * I, K, dtype=dtype).mT


def expected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    half = b.shape[1] // 2
    return torch.nn.functional.silu(a.double() @ b[:, :half].double()) * (a.double() @ b[:, half:].double())


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_values_by_hand(kernel: Kernel) -> None:
    """silu(1) 2, silu(0) 5 and silu(-1) 3: gate's columns come first, and swapped halves give silu(2) instead."""
    a = torch.zeros(1, 8)
    a[0, 0] = 1.0
    b = torch.zeros(8, 8)
    b[0] = torch.tensor([1.0, 0.0, -1.0, 4.0, 2.0, 5.0, 3.0, 0.0])
    silu_1 = 1.0 / (1.0 + math.exp(-1.0))
    result = kernel(a=a, b=b.mT.contiguous().mT)
    torch.testing.assert_close(result, torch.tensor([[2.0 * silu_1, 0.0, 3.0 * (silu_1 - 1.0), 0.0]]))


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_empty_sizes(kernel: Kernel) -> None:
    assert kernel(a=torch.ones(0, 4), b=torch.ones(4, 6)).shape == (0, 3)
    assert kernel(a=torch.ones(2, 4), b=torch.ones(4, 0)).shape == (2, 0)
    assert kernel(a=torch.ones(2, 0), b=torch.ones(0, 6)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("kernel", ANY_STRIDES, ids=by_id)
@pytest.mark.parametrize("transposed", [False, True])
def test_padded_rows_and_columns_are_not_read(kernel: Kernel, transposed: bool) -> None:
    """Views into wider buffers whose rest is NaN: a tile that reads past an edge shows."""
    wide_a, wide_b = torch.full((20, 40), torch.nan), torch.full((48, 48), torch.nan)
    a, b = wide_a[:17, :33], (wide_b.mT if transposed else wide_b)[:33, :38]
    a.copy_(torch.randn(17, 33))
    b.copy_(torch.randn(33, 38))
    torch.testing.assert_close(kernel(a=a, b=b), expected(a, b).float())


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_out_is_written_and_nothing_beside_it(kernel: Kernel) -> None:
    buffer = torch.full((6, 24), 7.0)
    out = buffer[1:4, 4:16]
    a, b = torch.randn(3, 8), weight(8, 12)
    assert kernel(a=a, b=b, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, expected(a, b).float())
    assert int((buffer == 7.0).sum()) == 6 * 24 - 3 * 12


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"a": torch.ones(4)}, r"a: expected shape \(\*, \*\), got \(4,\)"),
        ({"b": torch.ones(5, 6)}, r"b: expected shape \(4, \*\), got \(5, 6\)"),
        ({"b": torch.ones(4, 5)}, "b: expected an even last dimension, gate and up, got 5"),
        ({"b": torch.ones(4, 6, dtype=torch.float16)}, "b: expected torch.float32, got torch.float16"),
        ({"a": torch.ones(2, 4, dtype=torch.int32)}, "a: expected torch.float32 or .*, got torch.int32"),
        ({"out": torch.ones(2, 6)}, r"out: expected shape \(2, 3\), got \(2, 6\)"),
        ({"out": torch.ones(2, 3, dtype=torch.float16)}, "out: expected torch.float32"),
        ({"out": torch.ones(3, 2).mT}, "out: expected stride 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel.fn(**{"a": torch.ones(2, 4), "b": torch.ones(4, 6), **change})


@pytest.mark.parametrize("kernel", TMA, ids=by_id)
def test_tma_names_the_rung_that_takes_what_it_cannot(kernel: Kernel) -> None:
    instead = "gemm_silu_and_mul/fused takes any"
    a, b = torch.ones(16, 64, dtype=torch.bfloat16), weight(64, 32, torch.bfloat16)
    assert kernel.why_not_args({"a": a, "b": b}) is None
    for change in (
        {"b": b.contiguous()},
        {"a": torch.ones(64, 16, dtype=torch.bfloat16).mT},
        {"a": torch.ones(16, 68, dtype=torch.bfloat16)[:, 4:]},
        {"b": torch.ones(64, 68, dtype=torch.bfloat16)[:, :64].mT},
        {"b": weight(64, 33, torch.bfloat16)},
    ):
        assert instead in str(kernel.why_not_args({"a": a, "b": b, **change}))
        with pytest.raises(ValueError, match=instead):
            kernel.fn(**{"a": a, "b": b, **change})
    wide = torch.ones(16, 36, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"out: expected an address .*{instead}"):
        kernel.fn(a=a, b=b, out=wide[:, 4:])


def test_fp32_is_for_another_rung_than_cooperative() -> None:
    kernel = get_kernel("gemm_silu_and_mul", "cooperative")
    reason = kernel.why_not_args({"a": torch.ones(16, 64), "b": weight(64, 32)}).reason
    assert "gemm_silu_and_mul/persistent takes it" in str(reason)


@pytest.mark.parametrize("kernel", [kernel for kernel in ANY_STRIDES if kernel.backend == "triton"], ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are."""
    far = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 16), (2**30, 1))
    far.copy_(torch.arange(48).view(3, 16) / 64)
    b = torch.ones(16, 2, dtype=torch.float16) / 8
    torch.testing.assert_close(kernel(a=far, b=b), expected(far, b).half())
    b = torch.cat((far[1:2], far[2:3]))  # gate's row near, up's past 2**31
    pair = far[1:].mT
    a = torch.ones(1, 16, dtype=torch.float16)
    torch.testing.assert_close(kernel(a=a, b=pair), expected(a, b.mT).half())


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_dropped_k_is_rejected(scheme: str) -> None:
    """At every planted k, a product without that k lies outside the tolerance, in most elements."""
    case, labels = Case(M=8, I=8, K=130, layout="NT"), []
    for label, inputs in SPEC.planted(case, SCHEMES[scheme], CPU, 0):
        if not label.startswith("k="):
            continue
        k = int(label.removeprefix("k="))
        wrong = {**inputs, "a": inputs["a"].index_fill(1, torch.tensor([k]), 0.0)}
        stats = SPEC.judge(SPEC.oracle(wrong), SPEC.oracle(inputs), inputs, SCHEMES[scheme])
        assert stats[0].mismatched > stats[0].total / 2
        labels.append(k)
    assert labels == [0, 15, 16, 63, 64, 127, 128, 129]


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_wrong_activations_are_rejected(scheme: str) -> None:
    case = SPEC.cases["edge"][4]
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], CPU, 0)
    a, b = inputs["a"].double(), inputs["b"].double()
    half = b.shape[1] // 2
    gate, up = a @ b[:, :half], a @ b[:, half:]
    gelu = torch.nn.functional.gelu(gate)
    for wrong in (gate * torch.sigmoid(up) * up, gelu * up, gate * up, torch.sigmoid(gate) * up):
        assert not SPEC.judge((wrong,), SPEC.oracle(inputs), inputs, SCHEMES[scheme])[0].passed


def test_a_tf32_product_is_rejected() -> None:
    """Ten mantissa bits in place of 23 must not pass as fp32."""
    scheme = SCHEMES["fp32"]
    inputs = SPEC.make_inputs(Case(M=16, I=16, K=64, layout="NT"), scheme, CPU, 0)
    rounded = {name: (inputs[name].contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) for name in inputs}
    assert not SPEC.judge(SPEC.oracle(rounded), SPEC.oracle(inputs), inputs, scheme)[0].passed


def test_cost_and_traffic() -> None:
    """The fused rungs move what must move; the library's calls write the product, and read it back."""
    inputs = SPEC.make_inputs(Case(M=2048, I=14336, K=4096, layout="NT"), SCHEMES["bf16"], META, 0)
    cost, outputs = SPEC.cost(**inputs), 2048 * 14336
    assert cost.tensor_flops == {"bf16": 4 * outputs * 4096} and cost.sfu_ops == 2 * outputs
    assert cost.read_bytes == 2 * 4096 * (2048 + 2 * 14336) and cost.write_bytes == 2 * outputs
    library = get_kernel("gemm_silu_and_mul", "library").traffic_of(inputs)
    assert library.launches == 3 and library.bytes - cost.bytes == 2 * (2 + 1 + 1 + 2) * outputs
    assert get_kernel("gemm_silu_and_mul", "cooperative").traffic_of(inputs).bytes == cost.bytes


def test_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout: expected NN or NT, got 'TN'"):
        SPEC.make_inputs(Case(M=1, I=1, K=1, layout="TN"), SCHEMES["fp32"], CPU, 0)


@pytest.mark.parametrize("name", [pytest.param("persistent", marks=pytest.mark.slow), "cooperative"])
def test_a_cta_walks_over_several_tiles(name: str) -> None:
    """More tiles than CTAs, of which the first and the last run: values, and no race from one tile to the next."""
    case = Case(M=256, I=8704, K=136, layout="NT")
    answer = call(Target("gemm_silu_and_mul", name, case, SCHEMES["bf16"]), sample=0).answer
    assert answer["status"] == "OK" and answer["of"] == 132, answer


def test_a_consumer_ahead_of_the_other_is_right() -> None:
    kernel, case = get_kernel("gemm_silu_and_mul", "cooperative"), Case(M=256, I=8704, K=264, layout="NT")
    config = kernel.tuning.config_type(block_m=128, block_i=64, block_k=64, stages=6, group_m=16, lead=2)
    answer = call(Target("gemm_silu_and_mul", "cooperative", case, SCHEMES["fp16"], None, config), sample=0).answer
    assert answer["status"] == "OK", answer
