"""Every registered kernel is right on every smoke and edge case that it takes; what it does not take it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rooflab.bench.check.check import check_kernel
from rooflab.kernels.registry import Kernel, interpreting, kernels, ops
from rooflab.reference.spec import SCHEMES, Case, OpSpec

# On a GPU everything runs there, the library's bf16 included.
DEVICE = torch.device("cpu" if interpreting() else "cuda")
META = torch.device("meta")
SLOW = {
    "sample/bisect": "its planted inputs are hundreds of rows, at 40 ms a row in the interpreter",
    "flash_attention/masked_tiles": "a dozen planted inputs a case, at up to a second each; online's are run",
    "flash_attention_varlen/online": "the same",
    "paged_attention/chunked": "the same; gqa_packed's are run",
    "gemm/naive": "a program for each 16 by 64 outputs; tensor_core's are run",
    "gemm/stream_k": "programs in order, each with every tile's loop; split_k's are run",
    "gemm_grouped/grouped": "several seconds a case; gemm's are run",
    "gemm_grouped/tma": "the same",
    "gemm_silu_and_mul/fused": "the same",
}
"""Kernels whose planted inputs run on the smoke cases only, but for `make test-full`, and why."""


def _kernels() -> Iterator[tuple[Kernel, OpSpec]]:
    for op, spec in ops().items():
        for kernel in kernels(op).values():
            yield kernel, spec


def _interpreted(kernel: Kernel) -> bool:
    return kernel.backend != "torch" and interpreting()


def _in_bf16(name: str) -> bool:
    """Whether a scheme has bf16, which Triton's interpreter computes wrongly."""
    scheme = SCHEMES[name]
    return torch.bfloat16 in (scheme.activation, scheme.weight, scheme.output)


def _cases(spec: OpSpec) -> tuple[Case, ...]:
    return tuple(dict.fromkeys((*spec.cases["smoke"], *spec.cases["edge"])))


def _takes(kernel: Kernel, spec: OpSpec, case: Case, scheme: str) -> bool:
    """Whether the kernel takes such a case, by its shapes alone."""
    return kernel.why_not_args(spec.make_inputs(case, SCHEMES[scheme], META, 0)) is None


def _params() -> Iterator[object]:
    for kernel, spec in _kernels():
        if kernel.why_not_here(DEVICE) is not None:
            continue
        for case in _cases(spec):
            schemes = [scheme for scheme in spec.schemes if _takes(kernel, spec, case, scheme)]
            if _interpreted(kernel):
                schemes = [scheme for scheme in schemes if not _in_bf16(scheme)]
            for scheme in schemes:
                # Masks and edges are the same in every dtype, so the planted inputs that look for them run in one.
                planted = scheme == schemes[0]
                edge = _interpreted(kernel) and case not in spec.cases["smoke"]
                later = planted and edge and kernel.id in SLOW
                marks = [pytest.mark.slow] if edge and not planted else []  # the interpreter takes as long again
                name = f"{kernel.id}-{case.id}-{scheme}"
                yield pytest.param(kernel, case, scheme, planted and not later, id=name, marks=marks)
                if later:
                    yield pytest.param(kernel, case, scheme, True, id=f"{name}-planted", marks=[pytest.mark.slow])


@pytest.mark.parametrize(("kernel", "case", "scheme", "planted"), list(_params()))
def test_kernel(kernel, case, scheme, planted):
    spec = ops()[kernel.op]
    result = check_kernel(kernel, spec, case, SCHEMES[scheme], DEVICE, planted=planted)
    if result.status == "UNSUPPORTED":  # by what shapes do not say: an address, or a defect of torch on this CPU
        inputs = spec.make_inputs(case, SCHEMES[scheme], DEVICE, 0)
        assert kernel.why_not_args(inputs) is not None, result.describe()
        return
    assert result.status == "OK", result.describe()
    assert result.labels[0] == "first data" and 1 <= len(result.errors) <= len(spec.outputs)
    on_cpu = "torch" if kernel.backend == "torch" else "interpreter"
    assert result.checked_by == ("gpu" if DEVICE.type == "cuda" else on_cpu)


def test_what_cannot_run_here_says_why():
    """A kernel that cannot run here or does not take a case says why, and its check passes that on."""
    for kernel, spec in _kernels():
        elsewhere = kernel.why_not_here(DEVICE)
        for case in _cases(spec):
            for scheme in spec.schemes:
                refusal = elsewhere or kernel.why_not_args(spec.make_inputs(case, SCHEMES[scheme], META, 0))
                if refusal is not None:
                    assert refusal.status in ("UNSUPPORTED", "UNAVAILABLE") and refusal.reason
        if elsewhere is not None:
            result = check_kernel(kernel, spec, spec.cases["smoke"][0], SCHEMES[spec.schemes[0]], DEVICE)
            assert (result.status, result.reason, result.checked_by) == (elsewhere.status, elsewhere.reason, "none")


def test_the_interpreter_is_not_asked_for_bf16():
    kernel, spec = kernels("rmsnorm")["fused"], ops()["rmsnorm"]
    result = check_kernel(kernel, spec, spec.cases["smoke"][0], SCHEMES["bf16"], DEVICE)
    assert result.status == ("UNSUPPORTED" if interpreting() else "OK"), result.describe()


@pytest.mark.parametrize("op", ops())
def test_most_cases_can_tell_right_from_wrong(op):
    """A case that lets zeros pass may be there (all tokens skipped), but not in the smoke suite, nor as the rule."""
    spec, kernel = ops()[op], kernels(op)["naive"]
    scheme = SCHEMES["fp16" if "fp16" in spec.schemes else spec.schemes[0]]
    weak = {}
    for suite in ("smoke", "edge"):
        results = [check_kernel(kernel, spec, case, scheme, DEVICE, planted=False) for case in spec.cases[suite]]
        results = [result for result in results if result.status != "UNSUPPORTED"]  # it may lack an option
        assert results and all(result.status == "OK" for result in results)
        weak[suite] = [result.case.id for result in results if not result.discriminating]
    assert not weak["smoke"], weak["smoke"]
    assert len(weak["edge"]) <= len(spec.cases["edge"]) // 4, weak["edge"]


def test_each_kernel_is_checked_somewhere():
    """A kernel that refuses every smoke case, in every scheme that can be checked here, is checked by nothing."""
    for kernel, spec in _kernels():
        if kernel.why_not_here(DEVICE) is None:
            schemes = [scheme for scheme in spec.schemes if not (_interpreted(kernel) and scheme == "bf16")]
            pairs = [(case, scheme) for case in spec.cases["smoke"] for scheme in schemes]
            assert any(_takes(kernel, spec, *pair) for pair in pairs), kernel.id
