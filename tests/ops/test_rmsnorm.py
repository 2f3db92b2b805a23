"""rmsnorm: eps, fp16 range, what its tolerance rejects."""

from __future__ import annotations

import pytest
import torch
from op_kernels import CPU, each, here

from rooflab.kernels.registry import Kernel
from rooflab.reference.rmsnorm import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("rmsnorm")


@each(KERNELS)
def test_default_eps_and_a_row_of_zeros(kernel: Kernel) -> None:
    """eps = 1e-6: a row of 1e-3 has mean square eps and comes out as sqrt(1/2); zeros stay zeros."""
    x = torch.stack((torch.full((33,), 1e-3), torch.zeros(33)))
    result = kernel(x=x, weight=torch.ones(33))
    torch.testing.assert_close(result[0], torch.full((33,), 0.5**0.5))
    assert (result[1] == 0.0).all()


@each(KERNELS)
def test_squares_past_the_fp16_range(kernel: Kernel) -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    result = kernel(x=x, weight=torch.full((64,), 0.5, dtype=torch.float16))
    assert (result == 0.5).all()


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_wrong_norm_is_rejected(scheme: str) -> None:
    """A column that the sum misses (planted), a mean over padding, an eps left out."""
    case = Case(T=3, H=33, eps=1e-6)
    for label, inputs in SPEC.planted(case, SCHEMES[scheme], CPU, 0):
        oracle = SPEC.oracle(inputs)
        if label.startswith("column="):
            column = torch.tensor([int(label.removeprefix("column="))])
            rest = inputs["x"].double().index_fill(1, column, 0.0)
            scale = (rest.square().sum(1, keepdim=True) / 33 + inputs["eps"]).rsqrt()
        elif label == "mean square near eps":
            scale = inputs["x"].double().square().mean(1, keepdim=True).rsqrt()
        else:
            continue  # magnitudes: tests/zoo has kernels that square in x's dtype
        wrong = inputs["x"].double() * scale * inputs["weight"].double()
        assert not SPEC.judge((wrong,), oracle, inputs, SCHEMES[scheme])[0].passed
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], CPU, 0)
    oracle = SPEC.oracle(inputs)
    assert not SPEC.judge((oracle[0] * (64 / 33) ** 0.5,), oracle, inputs, SCHEMES[scheme])[0].passed
