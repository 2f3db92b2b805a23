"""The values that timed kernels get are allowed by their op: a right kernel stays right on them."""

import pytest
import torch

from rooflab.bench.core.call import Rotation
from rooflab.bench.core.timed import Unseen
from rooflab.kernels.registry import kernels, ops
from rooflab.reference.spec import get_scheme

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", ops())
def test_a_right_kernel_stays_right_on_renewed_values(op):
    spec = ops()[op]
    kernel = next(each for each in kernels(op).values() if each.backend == "torch" and not each.why_not_here(CPU))
    for turn, case in enumerate((*spec.cases["smoke"], *spec.cases["edge"])):
        scheme = get_scheme(spec.schemes[turn % len(spec.schemes)])
        copies = [spec.make_inputs(case, scheme, CPU, 0) for _ in range(2)]
        if kernel.why_not_args(copies[0]):
            continue
        rotation, unseen = Rotation(kernel, spec, copies), Unseen(spec, case, scheme, CPU, copies, 0)
        for _ in range(3):
            unseen()
        rotation(), rotation()
        assert unseen.wrong({kernel.name: rotation}) == {}, f"{case.id} {scheme.name}"
