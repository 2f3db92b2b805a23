"""Every registered kernel is right on every smoke and edge case, or says why it cannot be checked here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rooflab.bench.check.check import check_kernel
from rooflab.kernels.registry import Kernel, interpreting, kernels, ops
from rooflab.reference.spec import SCHEMES, Case, OpSpec

# On a GPU everything runs there, the library's bf16 included.
DEVICE = torch.device("cpu" if interpreting() else "cuda")
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


def _kernels() -> Iterator[Kernel]:
    for op in ops():
        yield from kernels(op).values()


def _takes(kernel: Kernel, spec: OpSpec, case: Case, scheme: str) -> bool:
    """Whether the kernel takes such a case, by its shapes alone."""
    if scheme not in spec.schemes:
        return False
    return kernel.why_not_args(spec.make_inputs(case, SCHEMES[scheme], torch.device("meta"), 0)) is None


def _params() -> Iterator[object]:
    for kernel in _kernels():
        spec = ops()[kernel.op]
        interpreted = kernel.backend != "torch" and interpreting()
        for case in dict.fromkeys((*spec.cases["smoke"], *spec.cases["edge"])):
            for scheme in spec.schemes:
                if interpreted and scheme == "bf16" and case != spec.cases["smoke"][0]:
                    continue  # one case says that the interpreter cannot do bf16; all of them would say it again
                # Planted inputs are about masks and edges, which are the same in every dtype.
                planted = not interpreted or scheme == spec.schemes[0]
                edge = interpreted and case not in spec.cases["smoke"]
                later = planted and edge and kernel.id in SLOW
                name = f"{kernel.id}-{case.id}-{scheme}"
                # So are edges, where fp32 has them: the interpreter takes as long again.
                again = edge and scheme == "fp16" and _takes(kernel, spec, case, "fp32")
                marks = [pytest.mark.slow] if again else []
                yield pytest.param(kernel.op, kernel.name, case, scheme, planted and not later, id=name, marks=marks)
                if later:
                    marks = [pytest.mark.slow]
                    yield pytest.param(kernel.op, kernel.name, case, scheme, True, id=f"{name}-planted", marks=marks)


@pytest.mark.parametrize(("op", "name", "case", "scheme", "planted"), list(_params()))
def test_kernel(op, name, case, scheme, planted):
    kernel = kernels(op)[name]
    result = check_kernel(kernel, ops()[op], case, SCHEMES[scheme], DEVICE, planted=planted)
    assert result.status in ("OK", "UNSUPPORTED", "UNAVAILABLE"), result.describe()
    if result.status == "OK":
        assert result.labels[0] == "first data" and 1 <= len(result.errors) <= len(ops()[op].outputs)
        on_cpu = "torch" if kernel.backend == "torch" else "interpreter"
        assert result.checked_by == ("gpu" if DEVICE.type == "cuda" else on_cpu)
    else:
        assert result.reason and result.checked_by == "none"


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


@pytest.mark.parametrize("kernel", [pytest.param(kernel, id=kernel.id) for kernel in _kernels()])
def test_each_kernel_is_checked_somewhere(kernel):
    """A kernel that refuses every smoke case, in every scheme that can be checked here, is checked by nothing."""
    reason = kernel.why_not_here(DEVICE)
    if reason:
        pytest.skip(str(reason))
    spec = ops()[kernel.op]
    interpreted = kernel.backend != "torch" and interpreting()
    schemes = [SCHEMES[scheme] for scheme in spec.schemes if not (interpreted and scheme == "bf16")]
    inputs = (spec.make_inputs(case, scheme, DEVICE, 0) for case in spec.cases["smoke"] for scheme in schemes)
    assert any(kernel.why_not_args(values) is None for values in inputs)
