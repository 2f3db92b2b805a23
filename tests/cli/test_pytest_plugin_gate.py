"""The checks with which the fixture `kernel_benchmark` refuses a result."""

import math

import pytest
import torch

from rooflab.bench.core import functions as fixture
from rooflab.roofline.model import Cost, Traffic

X = torch.tensor([1.0, -2.0, 0.0])


@pytest.mark.parametrize(
    ("actual", "expected", "passes"),
    [
        (X, X.double(), True),
        (X * (1 + 1e-6), X.double(), True),
        (X * (1 + 1e-4), X.double(), False),
        ((X * 1.01).bfloat16(), X.double(), True),
        ((X * 1.1).bfloat16(), X.double(), False),
        (X * math.nan, X * math.nan, False),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.0]), True),
        (torch.tensor([1e30, 1.0]), torch.tensor([math.inf, 1.0]), False),
        (torch.tensor([1, 3]), torch.tensor([1, 2]), False),
        (torch.zeros(3, 1), torch.zeros(1, 3), False),
        ((X, X), (X, X + 1), False),
        ((X, X), [X, X], True),
    ],
)
def test_the_gate_passes_what_is_right_to_a_few_roundings(actual, expected, passes):
    assert all(stats.passed for stats in fixture.FunctionOp.judge(actual, expected)) is passes


def test_what_cannot_be_compared_is_named():
    for actual, expected, text in (
        (None, X, "fn: expected a tensor or a tuple of tensors, got NoneType"),
        (X, 3.0, "reference: expected a tensor or a tuple of tensors, got float"),
        (X.half(), X, "output 0: expected torch.float32, as from the reference, got torch.float16"),
        ((X, X), X, "fn: expected 1 outputs, as from the reference, got 2"),
    ):
        with pytest.raises(ValueError, match=text):
            fixture.FunctionOp.judge(actual, expected)


def test_neither_side_of_the_gate_changes_the_callers_tensors():
    x = torch.ones(4)
    checked = fixture.Checked.of(lambda x: x.add_(1), [x], lambda x: x.add_(1))
    assert torch.equal(x, torch.ones(4)) and torch.equal(checked.result, torch.full((4,), 2.0))
    assert checked.fault == "" and not checked.interpreted


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["read_bytes", "write_bytes", "launches"])
def test_an_amount_that_counts_no_work_is_refused_where_it_enters(name, bad):
    amounts = {"read_bytes": 1, "write_bytes": 0, name: bad}
    for kind in (Cost, Traffic):
        with pytest.raises(ValueError, match=f"^{name}: expected a finite number from 0 on, got {bad}$"):
            kind(**amounts)
    with pytest.raises(ValueError, match=r"^tensor_flops\['fp32'\]: expected a finite number"):
        Cost(1, 1, {"fp32": bad})
