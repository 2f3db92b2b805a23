"""silu_and_mul: empty sizes, what its tolerance and that of gelu_and_mul reject, cost."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from op_kernels import CPU, META, each, here

from rooflab.kernels.registry import Kernel, get_op
from rooflab.reference.silu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case


@each(here("silu_and_mul"))
def test_empty_sizes(kernel: Kernel) -> None:
    assert kernel(x=torch.ones(0, 8)).shape == (0, 4)
    assert kernel(x=torch.ones(3, 0)).shape == (3, 0)


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


def test_cost_reads_two_and_writes_one() -> None:
    inputs = SPEC.make_inputs(Case(T=512, I=1536), SCHEMES["bf16"], META, 0)
    cost = SPEC.cost(**inputs)
    assert (cost.read_bytes, cost.write_bytes) == (2 * 512 * 3072, 2 * 512 * 1536)
