"""rope_and_cache: fp8, the input that launchers refuse, the memory that they leave alone, and the judge's refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import CPU, each, here

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.static import compile_kernels
from rooflab.kernels.registry import Kernel
from rooflab.kernels.rope_and_cache.fused import fused
from rooflab.kernels.rope_and_cache.naive import naive
from rooflab.reference.rope_and_cache import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = pytest.mark.parametrize("kernel", [naive, fused], ids=["naive", "fused"])
CASE = Case.parse("T=6,H=4,H_kv=2,D=16,rotary=16,max_position=50,num_blocks=3,block_size=4,skipped=2,interleaved=false")


def given(case: Case = CASE, scheme: str = "fp32") -> dict[str, Any]:
    return SPEC.make_inputs(case, SCHEMES[scheme], CPU, 0)


@KERNELS
def test_fp8_saturates_and_divides_by_the_scale(kernel: Any) -> None:
    inputs = given(scheme="kv_fp8")
    inputs["v"][:] = torch.tensor([1e4, -1e4, 3.0, 0.0]).repeat(4)
    inputs["v_scale"] = torch.tensor([2.0, 0.5])
    kernel(**inputs)
    slot = int(inputs["slot_mapping"][inputs["slot_mapping"] >= 0][0])
    stored = inputs["v_cache"].float().flatten(0, 1)[slot]
    assert stored[0, :4].tolist() == [448, -448, 1.5, 0] and stored[1, :4].tolist() == [448, -448, 6, 0]


@pytest.mark.more
def test_fp8_keeps_nan_on_a_card() -> None:
    """A minimum that drops NaN would make 448 of it.  The interpreter knows none, and stores 384."""
    (case, *_) = SPEC.cases["smoke"]
    ((info,),) = compile_kernels([KernelCase("rope_and_cache", "fused", case, SCHEMES["kv_fp8"])])
    assert "min.NaN" in info.ptx and "min.xorsign" not in info.ptx and "min.f32" not in info.ptx


@each(kernel for kernel in here("rope_and_cache") if kernel.name in ("naive", "native"))
def test_columns_behind_the_rotated_ones_pass_and_a_nan_of_a_table_stays_one(kernel: Kernel) -> None:
    """Also one whose bits, as fp32, are all set: rounding to bf16 as a number would make -0 of it."""
    inputs = given(CASE.but(rotary=6), "bf16")
    inputs["cos"][:] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    kernel.fn(**inputs)
    assert torch.equal(inputs["q_out"][..., 6:], inputs["q"][..., 6:]) and inputs["q_out"][..., :6].isnan().all()


@KERNELS
def test_half_of_a_pair_and_tables_wider_than_a_head_are_refused_and_change_nothing(kernel: Any) -> None:
    wide = torch.zeros(50, 9)
    for change, words in [
        ({"k_scale": torch.ones(2)}, "v_scale: expected both scales or none"),
        ({"q_norm": torch.ones(16)}, "k_norm: expected both norms or none"),
        ({"cos": wide, "sin": wide}, "cos: expected at most 8 columns, half of q's head_dim, got 9"),
    ]:
        inputs = given()
        before = {name: inputs[name].clone() for name in ("k_cache", "v_cache", "q")}
        with pytest.raises(ValueError, match=words):
            kernel(**inputs | change)
        assert all(inputs[name].equal(x) for name, x in before.items())


def test_slots_and_positions_outside_are_skipped_and_zeroed() -> None:
    inputs = given()
    caches = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    inputs["slot_mapping"].fill_(12)
    inputs["positions"][0] = 50
    fused(**inputs)
    assert inputs["k_cache"].equal(caches[0]) and inputs["v_cache"].equal(caches[1])
    assert not inputs["q_out"][0].any() and inputs["q_out"][1].any()
