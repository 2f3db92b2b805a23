"""Every kernel of the zoo has its verdict: kernels of small ops on one case, the lab's by the drawn checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from check.make import RIGHT, WRONG, first_fault, loaded
from zoo import cheats, kept, options, pages, right, right_memory, sizes, small, strides, values
from zoo.entries import ZOO, Entry

from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.timers import tampered
from rooflab.reference.spec import Case, get_scheme

KERNELS = (cheats, kept, options, pages, right, right_memory, sizes, small, strides, values)
SMALL = [entry for entry in ZOO if entry.small]
OF_THE_LAB = {entry.id: entry for entry in ZOO if not entry.small}
IN_CPP = "right: compiled to C++"
SHOWN = {
    "strides": "rmsnorm/rows_of_a_view",
    "in place": "fused_add_rmsnorm/residual_in_place",
    "values": "softmax/tiles_of_minus_infinity",
    "pages and slots": "kv_cache_write/last_slot",
    "options": "sample/top_p_before_top_k",
    "ragged sizes": "layernorm/padding_in_the_variance",
    "empty sizes": "gemm_grouped/bounds_without_repeats",
    "widths of an index or a grid": "embedding/last_row_of_the_table",
    "lengths of sequences": "flash_attention_varlen/sequences_by_marks",
    "kept state": "softmax/result_is_kept",
    "right: compiled": "rope/torch_script",
    "right: wrapped": "rmsnorm/module_forward",
    "right: another formula": "merge_attention_states/by_einsum",
    "right: another order of sums": "merge_attention_states/running_merge",
    "right: wrong only outside of the contract": "sample/nan_row_gives_minus_1",
    "right: scratch memory": "silu_and_mul/scratch_of_a_thread",
    "right: other libraries": "embedding/numpy_of_bits",
    "right: threads": "gelu_and_mul/threads_over_rows",
}
"""One kernel of each kind, whose verdict the op's first smoke case shows; what is compiled to C++ takes too long."""
CASES = {"layernorm/padding_in_the_variance": Case(T=3, H=33, bias=True, eps=1e-5)}
"""Or this case, where the smoke case has no such size."""
SCHEMES = {"right: a small op": ("fp32", "fp16"), "right: keeps something": ("fp32", "fp32", "fp16")}
SEED = 20
MOST = {"INCORRECT": None, "OK": 12}
"""Drawn checks of a kernel: a wrong one is found before they end.  results/check/README.md has those of 90 s."""


def each(entries):
    """A parameter for each of these kernels."""
    needs = {IN_CPP: pytest.mark.needs("C++ compiler")}
    return pytest.mark.parametrize(
        "entry", [pytest.param(entry, id=entry.id, marks=needs.get(entry.kind, ())) for entry in entries]
    )


def assert_verdict(entry: Entry, result) -> None:
    status, *words = entry.verdict
    assert result.status == status, result.describe()
    assert all(word in result.reason for word in words), result.reason
    assert tampered() is None, "what one kernel replaced is not laid on the next"
    if status == "OK":
        assert result.discriminating, result.describe()
        assert result.checked_by == ("interpreter" if entry.make().backend == "triton" else "torch")
        assert all(error.max_error_over_tolerance <= 1 for error in result.errors)


@each(SMALL)
def test_a_kernel_of_a_small_op_has_its_verdict(entry: Entry) -> None:
    kernel, case = entry.make(), entry.spec.cases["smoke"][0]
    for scheme in SCHEMES.get(entry.kind, ("fp32",)):
        assert_verdict(entry, check_kernel(kernel, entry.spec, case, get_scheme(scheme)))


@each([OF_THE_LAB[shown] for shown in SHOWN.values()])
def test_one_kernel_of_each_kind_has_its_verdict_on_a_fixed_case(entry: Entry) -> None:
    case = CASES.get(entry.id, entry.spec.cases["smoke"][0])
    assert_verdict(entry, check_kernel(entry.make(), entry.spec, case, get_scheme("fp32")))


@pytest.mark.timeout(1200)
@pytest.mark.sampled(0, 6)
@each(OF_THE_LAB.values())
def test_the_drawn_checks_give_a_kernel_its_verdict(entry: Entry) -> None:
    with loaded([entry.file]) as kernels:
        (kernel,) = (kernel for kernel in kernels if kernel.id == entry.id)
        found = first_fault(kernel, SEED, Checkers(torch.device("cpu")), most=MOST[entry.verdict[0]])
    wanted = "" if entry.verdict == ("OK",) else ": INCORRECT: "  # and no exception of its own
    assert wanted in found.fault and bool(wanted) == bool(found.fault), f"{found.checks} checks: {found.fault}"


def test_one_of_each_kind_is_shown() -> None:
    assert {OF_THE_LAB[shown].kind: shown for shown in SHOWN.values()} == SHOWN
    assert SHOWN.keys() | {IN_CPP} == {entry.kind for entry in OF_THE_LAB.values()}


def test_results_measure_every_kernel_of_the_lab_and_a_name_stands_once() -> None:
    measured = json.loads(Path(__file__).parents[2].joinpath("results", "check", "check.json").read_text())
    assert OF_THE_LAB.keys() <= {row["kernel"] for row in measured}
    for files, right_ones in ((WRONG, False), (RIGHT, True)):
        assert {*files} == {e.file.name for e in OF_THE_LAB.values() if (e.verdict == ("OK",)) == right_ones}
    assert len({entry.id for entry in ZOO}) == len(ZOO)
    assert {Path(str(file.__file__)) for file in KERNELS} == {entry.file for entry in ZOO}
