"""Tests that each registered kernel is right on every smoke and edge case that it takes, and refuses all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch

from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.check_data import CheckData
from rooflab.kernels.registry import CPU_BACKENDS, Kernel, interpreting, kernels, ops
from rooflab.reference.spec import SCHEMES, Case, Inputs, OpSpec

# On a GPU everything runs there, the library's bf16 included.
DEVICE = torch.device("cpu" if interpreting() else "cuda")
META = torch.device("meta")
SAMPLE = 20, 20
"""Cases of `make test` beside the first cases, and of `make test-more`."""
MANY_ROWS = ("sample/bisect",)
"""Kernels whose planted inputs are hundreds of rows, 40 ms each in the interpreter."""
SHARES = 4
"""Of the planted inputs an interpreted kernel has every fourth, the next kernel of the ladder the next ones, and all in
`make test-full`: of 12 s for 27 runs of `flash_attention_varlen/online` they were 10."""


def _kernels() -> Iterator[tuple[Kernel, OpSpec]]:
    for op, spec in ops().items():
        for kernel in kernels(op).values():
            yield kernel, spec


def _interpreted(kernel: Kernel) -> bool:
    return kernel.backend not in CPU_BACKENDS and interpreting()


def _in_bf16(name: str) -> bool:
    """Whether a scheme has bf16, which Triton's interpreter computes wrongly."""
    scheme = SCHEMES[name]
    return torch.bfloat16 in (scheme.activation, scheme.weight, scheme.output)


def _cases(spec: OpSpec) -> tuple[Case, ...]:
    return tuple(dict.fromkeys((*spec.cases["smoke"], *spec.cases["edge"])))


@cache
def _shapes(op: str, case: Case, scheme: str) -> Inputs:
    return ops()[op].make_inputs(case, SCHEMES[scheme], META, 0)


def _takes(kernel: Kernel, spec: OpSpec, case: Case, scheme: str) -> bool:
    """Whether the kernel takes such a case, by its shapes alone."""
    return kernel.why_not_args(_shapes(spec.name, case, scheme)) is None


def _params() -> Iterator[object]:
    """Each kernel that runs here on each case that it takes; what takes the interpreter long is slow.

    The first case runs in every scheme, and each other case in one scheme: the next case in the next. Planted inputs
    look for masks and edges, which are the same in every scheme: they run in that one. An interpreted kernel has a
    share of them on the smoke cases. Of the edge cases, without them, one kernel of the ladder has one, the next kernel
    the next one. `make test` runs the first case of each kernel and a sample of the others, `make test-more` a larger
    one, and `make test-full` all.
    """
    for op, spec in ops().items():
        here = [kernel for kernel in kernels(op).values() if kernel.why_not_here(DEVICE) is None]
        ladder = [kernel.name for kernel in here if _interpreted(kernel)]
        for kernel in here:
            interpreted = _interpreted(kernel)
            for number, case in enumerate(_cases(spec)):
                smoke = case in spec.cases["smoke"]
                skipped = interpreted and not smoke and (number + ladder.index(kernel.name)) % len(ladder)
                schemes = [scheme for scheme in spec.schemes if _takes(kernel, spec, case, scheme)]
                schemes = [scheme for scheme in schemes if not (interpreted and _in_bf16(scheme))]
                for turn, scheme in enumerate(schemes):
                    name, its_turn = f"{kernel.id}-{case.id}-{scheme}", turn == number % len(schemes)
                    marks = [] if not number and its_turn else [pytest.mark.sampled(*SAMPLE)]
                    marks = [pytest.mark.slow] if skipped or (number and not its_turn) else marks
                    planted = its_turn and (smoke or not interpreted) and kernel.id not in MANY_ROWS
                    share = ladder.index(kernel.name) % SHARES if interpreted else None
                    yield pytest.param(kernel, case, scheme, planted, share, id=name, marks=marks)
                    if planted and interpreted:
                        all_of_them = pytest.mark.slow
                        yield pytest.param(kernel, case, scheme, True, None, id=f"{name}-planted", marks=all_of_them)


@cache
def _with_share(op: str, share: int) -> OpSpec:
    """The op's spec with every fourth of its own sets of planted inputs."""
    spec, every = ops()[op], ops()[op].planted
    return replace(spec, planted=every and (lambda *made: islice(every(*made), share, None, SHARES)))


@pytest.mark.parametrize(("kernel", "case", "scheme", "planted", "share"), list(_params()))
def test_kernel(kernel, case, scheme, planted, share):
    spec = ops()[kernel.op]
    judge = spec if share is None else _with_share(kernel.op, share)
    result = check_kernel(kernel, judge, case, SCHEMES[scheme], DEVICE, planted=planted)
    if result.status == "UNSUPPORTED":  # by what shapes do not say: an address, or a defect of torch on this CPU
        inputs = spec.make_inputs(case, SCHEMES[scheme], DEVICE, 0)
        assert kernel.why_not_args(inputs) is not None, result.describe()
        return
    assert result.status == "OK", result.describe()
    assert result.labels[0] == "first data" and 1 <= len(result.errors) <= len(spec.outputs)
    on_cpu = {"torch": "torch", "cpp": "cpu"}.get(kernel.backend, "interpreter")
    assert result.checked_by == ("gpu" if DEVICE.type == "cuda" else on_cpu)


def test_what_cannot_run_here_says_why():
    """Its check passes the reason on."""
    for kernel, spec in _kernels():
        if (refusal := kernel.why_not_here(DEVICE)) is not None:
            assert refusal.status in ("UNSUPPORTED", "UNAVAILABLE") and refusal.reason
            result = check_kernel(kernel, spec, spec.cases["smoke"][0], SCHEMES[spec.schemes[0]], DEVICE)
            assert (result.status, result.reason, result.checked_by) == (refusal.status, refusal.reason, "none")


@pytest.mark.parametrize("op", ops())
def test_most_cases_can_tell_right_from_wrong(op):
    """A case that lets zeros pass may be there (all tokens skipped), but not in the smoke suite, nor as the rule."""
    spec = ops()[op]
    scheme = SCHEMES["fp16" if "fp16" in spec.schemes else spec.schemes[0]]
    for suite, most in (("smoke", 0), ("edge", len(spec.cases["edge"]) // 4)):
        made = {case.id: spec.make_inputs(case, scheme, DEVICE, 0) for case in spec.cases[suite]}
        weak = [name for name, inputs in made.items() if CheckData(spec, inputs, scheme).weak]
        assert len(weak) <= most, weak


def test_each_kernel_is_checked_somewhere():
    """A kernel that refuses every smoke case, in every scheme that can be checked here, is checked by nothing."""
    for kernel, spec in _kernels():
        if kernel.why_not_here(DEVICE) is None:
            schemes = [scheme for scheme in spec.schemes if not (_interpreted(kernel) and scheme == "bf16")]
            pairs = [(case, scheme) for case in spec.cases["smoke"] for scheme in schemes]
            assert any(_takes(kernel, spec, *pair) for pair in pairs), kernel.id
