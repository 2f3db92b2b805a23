"""silu_and_mul: the first half of a row is the gate."""

import torch
from op_kernels import CPU, is_right

from rooflab.reference.silu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case


def test_halves_in_the_other_order_are_rejected() -> None:
    inputs = SPEC.make_inputs(Case(T=4, I=333), SCHEMES["bf16"], CPU, 0)
    gate, up = inputs["x"].double().chunk(2, dim=-1)
    assert not is_right(SPEC, torch.nn.functional.silu(up) * gate, inputs, SCHEMES["bf16"])
