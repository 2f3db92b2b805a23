"""gelu_and_mul and silu_and_mul: what their tolerances reject."""

from functools import partial

import pytest
import torch
from op_kernels import CPU

from rooflab.kernels.registry import get_op
from rooflab.reference.spec import SCHEMES, Case


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul"])
def test_a_wrong_activation_is_rejected(op: str, scheme: str) -> None:
    """The other op's, the halves swapped, and in fp32 the exact gelu, which differs from tanh's by up to 5e-4."""
    spec = get_op(op)
    inputs = spec.make_inputs(Case(T=4, I=333), SCHEMES[scheme], CPU, 0)
    gate, up = inputs["x"].double().chunk(2, dim=-1)
    silu, gelu = torch.nn.functional.silu, partial(torch.nn.functional.gelu, approximate="tanh")
    right, wrong = (silu, gelu) if op == "silu_and_mul" else (gelu, silu)
    passes = lambda values: spec.judge((values,), spec.oracle(inputs), inputs, SCHEMES[scheme])[0].passed
    assert passes(right(gate) * up) and not passes(wrong(gate) * up) and not passes(right(up) * gate)
    assert scheme != "fp32" or not passes(torch.nn.functional.gelu(gate) * up)
