"""gelu_and_mul: tanh's approximation, and not the exact function, which differs by up to 5e-4."""

import torch
from op_kernels import CPU, is_right

from rooflab.reference.gelu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case


def test_the_exact_function_is_rejected_in_fp32() -> None:
    inputs = SPEC.make_inputs(Case(T=4, I=333), SCHEMES["fp32"], CPU, 0)
    gate, up = inputs["x"].double().chunk(2, dim=-1)
    assert not is_right(SPEC, torch.nn.functional.gelu(gate) * up, inputs, SCHEMES["fp32"])
