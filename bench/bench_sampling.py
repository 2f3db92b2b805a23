"""Sampling on a CPU from 32 rows of 128,256 tokens: the default kernel beside torch's sort, and greedy beside argmax.

`pytest bench --benchmark -k sampling`.  The default is to be faster than torch's sort and `torch.multinomial`, and its
greedy tokens are to take at most 1.2 times as long as `torch.argmax`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.sample_law import compare, compare_own_stream
from rooflab.reference.spec import Case, get_scheme

PAIRS = {"drawn": ("prefilter", "library"), "greedy": ("prefilter", "argmax")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=pytest.mark.benchmark(group=f"sample {kind}", max_time=2.0, min_rounds=5))
        for kind, names in PAIRS.items()
        for name in names
    ],
)
def test_sampling(kernel_benchmark: Callable[..., Any], kind: str, name: str) -> None:
    """Times one side of a pair, and judges its tokens."""
    spec, scheme = get_op("sample"), get_scheme("fp32")
    temperature = 1.0 if kind == "drawn" else 0.0
    case = Case(B=32, V=128256, temperature=temperature, top_k=50, top_p=0.95, min_p=0.0)
    inputs = spec.make_inputs(case, scheme, torch.device("cpu"), 0)
    if name == "argmax":
        kernel_benchmark(torch.argmax, inputs["logits"], dim=-1)
        return
    kernel = get_kernel("sample", name)
    tokens = kernel_benchmark(partial(kernel.fn, **inputs), cost=spec.cost_of(inputs))
    judge = compare if kernel.nondeterministic is None else compare_own_stream
    assert all(stats.passed for stats in judge((tokens,), spec.oracle(inputs), inputs, scheme))
