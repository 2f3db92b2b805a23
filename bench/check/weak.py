"""Wrong answers that a case would let pass: a check on such a case says little."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.bench.calls.outputs import dtypes, names
from rooflab.bench.check.trial import Data
from rooflab.reference.spec import OpSpec, Outputs, Scheme


def passing_wrong_answers(spec: OpSpec, data: Data, scheme: Scheme) -> Iterator[str]:
    """Wrong answers that would pass for right, one output at a time: `c: zeros`, the mean, shifted, unchanged.

    An output of one element has no mean or shift of its own, an empty one nothing to judge.
    """
    right = tuple(
        oracle if spec.mutates else oracle.to(dtype)
        for oracle, dtype in zip(data.oracle, dtypes(spec, data.oracle, scheme), strict=True)
    )
    for index, (name, oracle) in enumerate(zip(names(spec, data.oracle), data.oracle, strict=True)):
        for label, wrong in _wrong_answers(oracle, data.inputs[name] if spec.mutates else None):
            answer: Outputs = (*right[:index], wrong.to(right[index].dtype), *right[index + 1 :])
            if all(stats.passed for stats in spec.judge(answer, data.oracle, data.inputs, scheme)):
                yield f"{name}: {label}"


def _wrong_answers(oracle: torch.Tensor, unchanged: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    if oracle.numel():
        yield "zeros", torch.zeros_like(oracle)
    if oracle.numel() > 1:
        finite = oracle.double()[torch.isfinite(oracle)]
        yield "the mean", torch.full_like(oracle, float(finite.mean()) if finite.numel() else 0.0)
        yield "shifted by one", oracle.flatten().roll(1).reshape(oracle.shape)
    if unchanged is not None and unchanged.numel():
        yield "unchanged", unchanged
