"""Random matmuls, attentions and others, compiled for Hopper, are right in the emulator, and no race is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ptx_kernels import draws
from ptx_kernels.cases import Case
from ptx_processes import KernelWorker, races

MATMULS, ATTENTIONS, OTHERS = 40, 20, 20
"""In `make test`."""
ALL_MATMULS, ALL_ATTENTIONS, ALL_OTHERS = 500, 200, 300
STEP = 20
"""Configurations of a test."""


@pytest.fixture(scope="module")
def worker() -> Iterator[KernelWorker]:
    made = KernelWorker()
    yield made
    made.stop()


def _spans(quick: int, every: int) -> Iterator[object]:
    for first in range(0, every, STEP):
        yield pytest.param(first, id=f"{first}", marks=[pytest.mark.slow] if first >= quick else [])


def _check(worker: KernelWorker, cases: dict[int, Case]) -> None:
    wrong, refused = [], 0
    for number, case in cases.items():
        # A third in the order of seed 0, in which all warps go together as far as they can.
        found = worker.ask(case, number if number % 3 else 0)
        if found.get("compiler"):
            refused += 1
        elif "failed" in found or races(found) or not found["error"] <= found["allowed"]:
            wrong.append((number, case.maker, case.options, found))
    assert not wrong, f"{len(wrong)} of {len(cases)}, the first: {wrong[0]}"
    assert refused <= len(cases) // 10, f"the compiler refused {refused} of {len(cases)}"


@pytest.mark.parametrize("first", list(_spans(MATMULS, ALL_MATMULS)))
def test_random_matmuls_are_right_and_clean(worker: KernelWorker, first: int) -> None:
    _check(worker, {number: draws.matmul(number) for number in range(first, first + STEP)})


@pytest.mark.parametrize("first", list(_spans(ATTENTIONS, ALL_ATTENTIONS)))
def test_random_attentions_are_right_and_clean(worker: KernelWorker, first: int) -> None:
    _check(worker, {number: draws.attention(number) for number in range(first, first + STEP)})


@pytest.mark.parametrize("first", list(_spans(OTHERS, ALL_OTHERS)))
def test_random_sizes_of_other_kernels_are_right_and_clean(worker: KernelWorker, first: int) -> None:
    _check(worker, {number: draws.anything(number) for number in range(first, first + STEP)})


def test_the_draws_reach_what_they_are_there_for() -> None:
    matmuls = [draws.matmul(number) for number in range(MATMULS)]
    assert {case.maker for case in matmuls} == {"tma", "pointers"}
    for option, wanted in (("trans", {"NN", "NT", "TN", "TT"}), ("stages", {1, 2, 3, 4}), ("warps", {4, 8})):
        assert {case.options[option] for case in matmuls} == wanted
    assert any(case.options.get("ws") for case in matmuls) and any(case.options.get("on_device") for case in matmuls)
    assert any(case.options["K"] % case.options["BK"] for case in matmuls)
    attentions = [draws.attention(number).options for number in range(ATTENTIONS)]
    for option, wanted in (("D", {16, 32, 64, 128}), ("causal", {True, False}), ("by_tma", {True, False})):
        assert {options[option] for options in attentions} == wanted
    assert any(options["ws"] for options in attentions)
