"""Ops over rows: values by hand where a range ends or a sum cancels or rounds, and ids outside of a table."""

from __future__ import annotations

import math

import pytest
import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel, get_kernel


@each(here("softmax"))
def test_a_softmax_of_large_values_and_minus_infinity(kernel: Kernel) -> None:
    x = torch.tensor([[3e38, 3e38, -3e38], [-3e38, -math.inf, -3e38], [-math.inf, 5.0, -math.inf]])
    assert kernel(x=x).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]


@each(here("layernorm"))
def test_a_row_of_one_value_becomes_the_bias(kernel: Kernel) -> None:
    """Its variance is 0, also where squares of its values are not exact."""
    x = torch.full((2, 33), 1234.567)
    result = kernel(x=x, weight=torch.full((33,), 2.0), bias=torch.arange(33.0))
    torch.testing.assert_close(result, torch.arange(33.0).expand(2, 33), rtol=0, atol=0.3)
    assert kernel(x=torch.zeros(1, 5), weight=torch.ones(5)).abs().max() == 0


@each(here("rmsnorm"))
def test_the_eps_of_a_norm_and_squares_past_the_fp16_range(kernel: Kernel) -> None:
    """eps = 1e-6: a row of 1e-3 has mean square eps and comes out as sqrt(1/2); zeros stay zeros."""
    result = kernel(x=torch.stack((torch.full((33,), 1e-3), torch.zeros(33))), weight=torch.ones(33))
    torch.testing.assert_close(result[0], torch.full((33,), 0.5**0.5))
    assert (result[1] == 0.0).all()
    large, half = torch.full((1, 64), 60000.0).half(), torch.full((64,), 0.5).half()
    assert (kernel(x=large, weight=half) == 0.5).all()


@each(here("fused_add_rmsnorm"))
def test_the_sum_is_rounded_to_nearest_even(kernel: Kernel) -> None:
    """fp16 is two apart from 2048 on: 2049 goes down to 2048, 2051 up to 2052, and 65519 to the largest, 65504."""
    x = torch.tensor([[2048.0, 2048.0, 65504.0, 1.0]], dtype=torch.float16)
    residual = torch.tensor([[1.0, 3.0, 15.0, 2.0**-12]], dtype=torch.float16)
    _, new_residual = kernel(x=x, residual=residual, weight=torch.ones(4, dtype=torch.float16))
    assert new_residual.tolist() == [[2048.0, 2052.0, 65504.0, 1.0]]


@each([*here("silu_and_mul"), *here("gelu_and_mul")])
def test_a_large_gate_passes_its_value_on_or_stops_it(kernel: Kernel) -> None:
    """Also where a row's half is no power of two."""
    x = torch.tensor([[100.0, 80.0, -100.0, 2.0, -0.5, 3.0]])
    torch.testing.assert_close(kernel(x=x), torch.tensor([[200.0, -40.0, 0.0]]))


@each(here("embedding", "triton"))
def test_an_id_outside_the_table_reads_nothing(kernel: Kernel) -> None:
    weight = torch.full((6, 4), torch.nan)
    weight[1:4] = 1.0
    result = kernel(token_ids=torch.tensor([-1, 2, 3]), weight=weight[1:4])
    assert result.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    with pytest.raises(IndexError):
        get_kernel("embedding", "library")(token_ids=torch.tensor([3]), weight=torch.ones(3, 4))
