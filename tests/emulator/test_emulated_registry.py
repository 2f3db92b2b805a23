"""Every registered kernel with compiled code, in the emulator, against the fp64 oracle; no GPU is needed."""

import pytest
from op_kernels import check_emulated
from ptx_processes import MENDED_LATER, OLD_TRITON

from rooflab.bench.compile.cases import has_code
from rooflab.bench.core.outside import CheckTask
from rooflab.bench.core.select import first_case
from rooflab.kernels import registry
from rooflab.reference.spec import get_scheme

KERNELS = [kernel for op in registry.ops() for kernel in registry.kernels(op).values() if has_code(kernel)]
OPS = list(dict.fromkeys(kernel.op for kernel in KERNELS))


def schemes_of(kernel):
    """Every dtype; of a Triton kernel those that the interpreter computes wrongly: it checks the others elsewhere."""
    every = registry.get_op(kernel.op).schemes
    own = [scheme for scheme in every if kernel.backend != "triton" or scheme not in ("fp32", "fp16")]
    return own or every[:1]


def asked_first(op, turns):
    """Each kernel of an op on its first smoke case, in as many schemes; the next kernel begins with the next scheme.

    Planted inputs find masks and edges: those of Triton kernels are looked for in the interpreter.
    """
    found = []
    for number, kernel in enumerate(kernel for kernel in KERNELS if kernel.op == op):
        schemes = [get_scheme(scheme) for scheme in schemes_of(kernel)]
        first = [(first_case(kernel, registry.get_op(kernel.op), scheme, ["smoke"]), scheme) for scheme in schemes]
        taken = [(case, scheme) for case, scheme in first if case is not None]
        chosen = dict.fromkeys(taken[(number + turn) % len(taken)] for turn in range(turns))
        found += [CheckTask(kernel, case, scheme, planted=kernel.backend != "triton") for case, scheme in chosen]
    return found


def wrong(found):
    bad = [item.describe() for item in found if item.status not in ("OK", "UNSUPPORTED")]
    return [text for text in bad if not (OLD_TRITON and MENDED_LATER in text)]


@pytest.mark.sampled(0, 6)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turns", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", OPS)
def test_every_kernel_is_right_and_races_nowhere_on_its_first_case(op, turns):
    """On the first smoke case that it takes, for the time."""
    found = check_emulated(asked_first(op, turns))
    assert wrong(found) == []
    ran = {(item.op, item.kernel) for item in found if item.checked_by == "emulator"}
    assert ran == {(kernel.op, kernel.name) for kernel in KERNELS if kernel.op == op}, "each has a case that it takes"
    assert all(item.bytes["hbm_write"] > 0 for item in found if item.bytes is not None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", ["smoke", "edge"])
@pytest.mark.parametrize("op", OPS)
def test_every_kernel_is_right_on_every_case(op, suite):
    """Each in one dtype: the next case and the next kernel begin with the next one."""
    spec, kernels = registry.get_op(op), [kernel for kernel in KERNELS if kernel.op == op]
    asked = [
        CheckTask(kernel, case, get_scheme(spec.schemes[(turn + number) % len(spec.schemes)]))
        for turn, kernel in enumerate(kernels)
        for number, case in enumerate(spec.get_cases(suite))
    ]
    assert wrong(check_emulated(asked)) == []
