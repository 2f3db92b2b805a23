"""Weight-only products: the formula by hand, packed forms, and that no weight is rounded before its product."""

from __future__ import annotations

import pytest
import torch
from op_kernels import CPU

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.emulate.calls import call
from rooflab.kernels.gemm_w4a16 import _packed as packed_w4
from rooflab.kernels.gemm_w4a16 import library
from rooflab.kernels.gemm_w8a16 import _packed as packed_w8
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.gemm_w4a16 import SPEC, gemm_w4a16, group_size
from rooflab.reference.quantization import dequantize_int4, dequantize_int8, pack_int4
from rooflab.reference.spec import SCHEMES, Case


def test_packing_is_a_permutation_within_16_bytes() -> None:
    """Each word by its own formula: in w4 four bits number 2 s + h + 4 e of word t are k = 16 s + 8 h + 2 t + e, in w8
    byte h + 2 e is k = 8 h + 2 t + e."""
    generator = torch.Generator().manual_seed(0)
    nibbles = torch.randint(0, 16, (3, 70), generator=generator)
    codes = torch.randint(-128, 128, (3, 37), generator=generator, dtype=torch.int8)
    for words, values, bits in (
        (packed_w4.pack(pack_int4(nibbles)).tolist(), nibbles.tolist(), 4),
        (packed_w8.pack(codes.mT).tolist(), codes.tolist(), 8),
    ):
        count, K = 32 // bits, len(values[0])
        for n, at, place in ((n, at, place) for n in range(3) for at in range(12) for place in range(count)):
            e, s, h = place // (count // 2), place // 2 % (count // 4), place % 2
            k = 4 * count * (at // 4) + 16 * s + 8 * h + 2 * (at % 4) + e
            found = (words[n][at] >> bits * place) & 2**bits - 1
            assert len(words[n]) == 12 and found == (values[n][k] & 2**bits - 1 if k < K else 0)


def test_the_reference_by_hand() -> None:
    """Two groups of one row, of which the second is short: (code - zero) scale, low half first."""
    a = torch.ones(1, 34, dtype=torch.bfloat16)
    codes = torch.zeros(1, 34, dtype=torch.uint8)
    codes[0, 33] = 15
    scale, zero = torch.tensor([[1.0, 100.0]]), torch.tensor([[0, 1]], dtype=torch.uint8)
    assert gemm_w4a16(a, pack_int4(codes), scale).tolist() == [[-8.0 * 32 - 800 + 700]]
    assert gemm_w4a16(a, pack_int4(codes), scale, zero).tolist() == [[-100.0 + 1400]]


def test_torchs_layout_is_undone_by_its_own_unpacking() -> None:
    inputs = SPEC.make_inputs(Case(M=4, N=32, K=256, zeros=False, bias=False), SCHEMES["w4a16_g32"], CPU, 0)
    weight = library.pack(inputs["b"], inputs["scale"], None)
    assert weight.shape == (32, 128) and weight.nbytes == 32 * 128 + 2 * inputs["scale"].nbytes
    with pytest.raises(ValueError, match="b: expected N in multiples of 16, as torch packs it here, got 31"):
        library.pack(torch.zeros((31, 64), dtype=torch.uint8), torch.ones(31, 4), None)


@pytest.mark.more
@pytest.mark.parametrize(
    ("op", "name", "case", "scheme"),
    [
        ("gemm_w4a16", "gemv", "M=3,N=48,K=256,zeros=true,bias=false", "w4a16_g64"),
        ("gemm_w4a16", "dequant_dot", "M=3,N=48,K=256,zeros=false,bias=false", "w4a16_g64"),
        ("gemm_w8a16", "gemv", "M=3,N=48,K=256,bias=false", "w8a16"),
        ("gemm_w8a16", "dequant_dot", "M=3,N=48,K=256,bias=false", "w8a16"),
    ],
)
def test_rungs_round_no_weight(op, name, case, scheme, tmp_path) -> None:
    """In the emulator, within what fp32 sums and one rounding lose: naive, which rounds each weight, is beyond it."""
    spec, scheme = get_op(op), SCHEMES[scheme]
    call(KernelCase(op, name, Case.parse(case), scheme), save=tmp_path / "out.pt")
    inputs = spec.make_inputs(Case.parse(case), scheme, CPU, 0)
    (oracle,), (found,) = spec.oracle(inputs), torch.load(tmp_path / "out.pt")
    if op == "gemm_w4a16":
        group = group_size(256, inputs["scale"].shape[1])
        weight = dequantize_int4(inputs["b"], inputs["scale"], inputs["zero"], group=group)
    else:
        weight = dequantize_int8(inputs["b"].mT, inputs["scale"])
    walk = inputs["a"].double().abs() @ weight.abs().mT
    limit = 4 * 2.0**-24 * 256**0.5 * walk + 2.0**-8 * oracle.abs() + 1e-30
    assert ((found.double() - oracle).abs() <= limit).all()
    naive = get_kernel(op, "naive")(**inputs)
    assert ((naive.double() - oracle).abs() > limit).any()
