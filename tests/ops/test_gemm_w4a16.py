"""gemm_w4a16: the formula by hand, torch's packed form, and what Marlin is given."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from op_kernels import CPU, assert_right

from rooflab.kernels.gemm_w4a16 import library, marlin
from rooflab.reference.gemm_w4a16 import SPEC, gemm_w4a16
from rooflab.reference.quantization import pack_int4, unpack_int4
from rooflab.reference.spec import SCHEMES, Case


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


class FakeLayer:
    """What Marlin's `Layer` does with a fake-quantised linear: its layout is its own affair."""

    def __init__(self, K: int, N: int, groupsize: int):
        assert groupsize == 128
        self.workspace = torch.zeros(N // 128 * 16, dtype=torch.int32)

    def to(self, device: torch.device) -> FakeLayer:
        return self

    def pack(self, linear: torch.nn.Linear, scales: torch.Tensor) -> None:
        N, groups = scales.shape
        self.B = (linear.weight.data / scales.repeat_interleave(128, dim=1)).round()


def fake_mul(a, B, c, s, workspace) -> None:
    """Scale number 8 i + j of each 64 along N is that of channel 8 j + i."""
    plain = torch.empty_like(s)
    for i in range(8):
        for j in range(8):
            plain[:, 8 * j + i :: 64] = s[:, 8 * i + j :: 64]
    assert a.dtype == s.dtype == c.dtype == torch.half and not workspace.any()
    c.copy_(a.float() @ (B.float() * plain.mT.float().repeat_interleave(128, dim=1)).mT)


def test_what_marlin_is_given(monkeypatch) -> None:
    """Codes less 8, a scale of 1 to pack with, and the real scales in tiles of 8 x 8."""
    fake = ModuleType("marlin")
    fake.Layer, fake.mul = FakeLayer, fake_mul
    monkeypatch.setitem(sys.modules, "marlin", fake)
    scheme = SCHEMES["w4a16_g128"]
    inputs = SPEC.make_inputs(Case(M=3, N=256, K=256, zeros=False, bias=False), scheme, CPU, 0)
    packed = marlin.pack(inputs["b"], inputs["scale"])
    assert torch.equal(packed.tensor, unpack_int4(inputs["b"]).half() - 8)
    assert_right(SPEC, marlin.marlin(**{**inputs, "b": packed}), inputs, scheme)
