"""silu_and_mul: empty sizes, cost; what its tolerance rejects is in `test_gelu_and_mul.py`."""

import torch
from op_kernels import META, each, here

from rooflab.kernels.registry import Kernel
from rooflab.reference.silu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case


@each(here("silu_and_mul"))
def test_empty_sizes(kernel: Kernel) -> None:
    assert kernel(x=torch.ones(0, 8)).shape == (0, 4)
    assert kernel(x=torch.ones(3, 0)).shape == (3, 0)


def test_cost_reads_two_and_writes_one() -> None:
    inputs = SPEC.make_inputs(Case(T=512, I=1536), SCHEMES["bf16"], META, 0)
    cost = SPEC.cost_of(inputs)
    assert (cost.read_bytes, cost.write_bytes) == (2 * 512 * 3072, 2 * 512 * 1536)
