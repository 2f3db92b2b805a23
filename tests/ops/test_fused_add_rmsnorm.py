"""fused_add_rmsnorm: the rounding of the sum, what its tolerance rejects."""

from __future__ import annotations

import torch
from op_kernels import CPU, each, here

from rooflab.kernels.registry import Kernel
from rooflab.reference.fused_add_rmsnorm import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("fused_add_rmsnorm")


@each(KERNELS)
def test_the_sum_is_rounded_to_nearest_even(kernel: Kernel) -> None:
    """fp16 is two apart from 2048 on: 2049 goes down to 2048, 2051 up to 2052, and 65519 to the largest, 65504."""
    x = torch.tensor([[2048.0, 2048.0, 65504.0, 1.0]], dtype=torch.float16)
    residual = torch.tensor([[1.0, 3.0, 15.0, 2.0**-12]], dtype=torch.float16)
    _, new_residual = kernel(x=x, residual=residual, weight=torch.ones(4, dtype=torch.float16))
    assert new_residual.tolist() == [[2048.0, 2052.0, 65504.0, 1.0]]


def test_an_unrounded_sum_is_rejected() -> None:
    """The residual stream is what the dtype holds; a sum kept in fp32 is another op."""
    inputs = SPEC.make_inputs(Case(T=2, H=64, eps=1e-6), SCHEMES["bf16"], CPU, 0)
    oracle = SPEC.oracle(inputs)
    unrounded = inputs["x"].double() + inputs["residual"].double()
    out, new_residual = SPEC.judge((oracle[0], unrounded), oracle, inputs, SCHEMES["bf16"])
    assert out.passed
    assert not new_residual.passed
