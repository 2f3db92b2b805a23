"""softmax: its range, columns of -inf, what its tolerance rejects."""

from __future__ import annotations

import math

import pytest
import torch
from op_kernels import CPU, each, here

from rooflab.kernels.registry import Kernel
from rooflab.reference.softmax import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("softmax")


@each(KERNELS)
def test_large_values_and_minus_infinity(kernel: Kernel) -> None:
    x = torch.tensor([[3e38, 3e38, -3e38], [-3e38, -math.inf, -3e38], [-math.inf, 5.0, -math.inf]])
    assert kernel(x=x).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_wrong_softmax_is_rejected(scheme: str) -> None:
    """A column that the sum misses (planted), and a sum that has a padded column of zeros."""
    for label, inputs in SPEC.planted(Case(T=3, H=33), SCHEMES[scheme], CPU, 0):
        if not label.startswith("column="):
            continue
        oracle, weights = SPEC.oracle(inputs), inputs["x"].double().exp()
        missed = weights.sum(1, keepdim=True) - weights[:, [int(label.removeprefix("column="))]]
        assert not SPEC.judge((weights / missed,), oracle, inputs, SCHEMES[scheme])[0].passed
    inputs = {"x": -5.0 * torch.rand(3, 33).to(SCHEMES[scheme].activation)}
    weights = inputs["x"].double().exp()
    padded = weights / (weights.sum(1, keepdim=True) + 1.0)
    assert not SPEC.judge((padded,), SPEC.oracle(inputs), inputs, SCHEMES[scheme])[0].passed
