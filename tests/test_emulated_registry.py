"""Every registered kernel with compiled code, in the emulator, against the fp64 oracle: no GPU has to be there."""

import pytest

from rooflab.bench.emulated_checks import Asked, can_be_emulated, check_emulated
from rooflab.kernels import registry
from rooflab.reference.spec import get_scheme

KERNELS = [kernel for op in registry.ops() for kernel in registry.kernels(op).values() if can_be_emulated(kernel)]


def asked(suite, first=None):
    return [
        Asked(kernel, case, get_scheme(scheme))
        for kernel in KERNELS
        for scheme in registry.get_op(kernel.op).schemes
        for case in registry.get_op(kernel.op).get_cases(suite)[:first]
    ]


def wrong(found):
    return [item.result.describe() for item in found if item.result.status not in ("OK", "UNSUPPORTED")]


def test_every_kernel_is_right_and_races_nowhere_on_its_first_case():
    """In every dtype, bf16 among them, which Triton's interpreter computes wrongly; on one case, for the time."""
    found = list(check_emulated(asked("smoke", 1)))
    assert wrong(found) == []
    ran = {(item.result.op, item.result.kernel) for item in found if item.result.checked_by == "emulator"}
    assert ran == {(kernel.op, kernel.name) for kernel in KERNELS}, "each has a case that it takes"
    assert all(item.bytes["hbm_write"] > 0 for item in found if item.bytes is not None)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["smoke", "edge"])
def test_every_kernel_is_right_on_every_case(suite):
    assert wrong(list(check_emulated(asked(suite)))) == []
