"""silu_and_mul: empty sizes, what its tolerance rejects, cost."""

from __future__ import annotations

import pytest
import torch
from op_kernels import CPU, META, each, here

from rooflab.kernels.registry import Kernel
from rooflab.reference.silu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("silu_and_mul")


@each(KERNELS)
def test_empty_sizes(kernel: Kernel) -> None:
    assert kernel(x=torch.ones(0, 8)).shape == (0, 4)
    assert kernel(x=torch.ones(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_wrong_activation_is_rejected(scheme: str) -> None:
    """gelu in place of silu, and the halves swapped."""
    inputs = SPEC.make_inputs(Case(T=4, I=33), SCHEMES[scheme], CPU, 0)
    gate, up = inputs["x"].double().chunk(2, dim=-1)
    oracle = SPEC.oracle(inputs)
    for wrong in (torch.nn.functional.gelu(gate) * up, torch.nn.functional.silu(up) * gate):
        assert not SPEC.judge((wrong,), oracle, inputs, SCHEMES[scheme])[0].passed


def test_cost_reads_two_and_writes_one() -> None:
    inputs = SPEC.make_inputs(Case(T=512, I=1536), SCHEMES["bf16"], META, 0)
    cost = SPEC.cost(**inputs)
    assert (cost.read_bytes, cost.write_bytes) == (2 * 512 * 3072, 2 * 512 * 1536)
