"""gelu_and_mul: what its tolerance rejects."""

from __future__ import annotations

import pytest
import torch
from op_kernels import CPU, here

from rooflab.reference.gelu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("gelu_and_mul")


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_wrong_activation_is_rejected(scheme: str) -> None:
    """silu in place of gelu, the halves swapped, and in fp32 the exact gelu, which differs by up to 5e-4."""
    inputs = SPEC.make_inputs(Case(T=4, I=333), SCHEMES[scheme], CPU, 0)
    gate, up = inputs["x"].double().chunk(2, dim=-1)
    oracle = SPEC.oracle(inputs)
    tanh = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert SPEC.judge((tanh,), oracle, inputs, SCHEMES[scheme])[0].passed
    wrong = [torch.nn.functional.silu(gate) * up, torch.nn.functional.gelu(up, approximate="tanh") * gate]
    wrong += [torch.nn.functional.gelu(gate) * up] if scheme == "fp32" else []
    for values in wrong:
        assert not SPEC.judge((values,), oracle, inputs, SCHEMES[scheme])[0].passed
