"""A process that launches kernels on real tensors between guards, as a check on a GPU does, and only compiles them."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.bench.compile.capture import Launch, recording_cuda, recording_triton
from rooflab.bench.compile.cases import ARCHITECTURE, SM, has_code, properties
from rooflab.bench.core.poison import guard
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme


def answer(request: Any) -> int:
    """The number of launches of an op's kernels with code of our own."""
    op, text, rungs = request
    spec = registry.get_op(op)
    inputs = spec.make_inputs(spec.check_case(Case.parse(text)), get_scheme("bf16"), torch.device("cpu"), 0)
    inputs = {name: guard(x).view if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    found: list[Launch] = []
    with recording_triton(SM, properties(), found), recording_cuda(ARCHITECTURE, found):
        for kernel in registry.kernels(op).values():
            if has_code(kernel) and kernel.role == "optimized" and (not rungs or kernel.name in rungs):
                kernel(**inputs)
    return len(found)
