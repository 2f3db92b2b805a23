"""Of the cases of a suite, those with the most to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rooflab.reference.spec import Case, OpSpec, get_scheme
from rooflab.roofline.model import Cost


def largest(spec: OpSpec, cases: Sequence[Case]) -> list[Case]:
    """The case of most FLOPs and that of most bytes, in the order of `cases`; the last of several that are alike.

    Two, because the largest matrix product of a model is bound by compute and its longest weight by memory; often they
    are one.
    """
    scheme = get_scheme(spec.schemes[0])  # dtypes change the bytes of all cases alike
    costs: dict[Case, Cost] = {}
    for case in reversed(cases):
        costs[case] = spec.cost(**spec.make_inputs(case, scheme, torch.device("meta"), 0))
    if not costs:
        return []
    chosen = {
        max(costs, key=lambda case: (costs[case].flops, costs[case].bytes)),
        max(costs, key=lambda case: (costs[case].bytes, costs[case].flops)),
    }
    return [case for case in cases if case in chosen]
