"""The page of other projects' kernels: its entries, its records, and one entry run as the page runs it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from compatibility.entries import made
from compatibility.faults import FAULTS
from compatibility.page import beside, is_right, page_of, read, rows_of, run
from compatibility.worker import projects

from rooflab.bench.emulator.races.shadow_memory import nearly_equal

PAGE = Path(__file__).parents[2] / "results" / "compatibility" / "README.md"
KERNELS, PLANTED = beside(PAGE)
FOUND = json.loads(PLANTED.read_text())
ENTRIES = [(name, entry) for name, project in projects().items() for entry in project.entries]


def test_inputs_can_be_made_and_names_are_unique() -> None:
    for _, entry in ENTRIES:
        inputs = made(entry.inputs)
        assert all(inputs[grad].is_floating_point() for grad in filter(None, entry.grad.split(","))), entry.name
    names = [(name, entry.name) for name, entry in ENTRIES]
    assert len(set(names)) == len(names)


def test_sources_are_pinned() -> None:
    for project in projects().values():
        assert all("==" in pinned for pinned in (project.source.pinned, *project.source.needs))


def test_the_page_is_that_of_its_records_and_has_every_entry() -> None:
    records = read(KERNELS)
    assert [(each["project"], each["entry"]) for each in records] == [(name, entry.name) for name, entry in ENTRIES]
    assert PAGE.read_text() == page_of(records, FOUND)


def test_most_kernels_are_right_within_seconds() -> None:
    rows = rows_of(read(KERNELS))
    assert len(rows) >= 120
    assert sum(map(is_right, rows)) >= 110 / 120 * len(rows)
    assert statistics.median(row["seconds"] for row in rows) <= 4.0


def test_every_planted_fault_is_found_and_nothing_without_it() -> None:
    assert [(each["project"], each["entry"]) for each in FOUND] == [fault[:2] for fault in FAULTS]
    assert len(FOUND) >= 60 and all(each["planted"] for each in FOUND)
    assert all(each["unchanged"] == [] for each in FOUND if each["project"] == "rooflab")
    assert sum(bool(each["rule"]) for each in FOUND) >= 58 and sum(each["names_line"] for each in FOUND) >= 45


@pytest.mark.more
def test_an_entry_runs_as_on_the_page() -> None:
    record = run("liger", "swiglu")
    assert is_right(record), record
    assert [kernel["kernel"] for kernel in record["kernels"]] == ["_swiglu_forward_kernel", "_swiglu_backward_kernel"]
    assert all(kernel["file"] == "swiglu.py" and not kernel["races"] for kernel in record["kernels"])
    assert 0 < record["error"] <= 1


def test_sums_in_vectors_differ_by_rounding_too() -> None:
    """`st.shared.v4` passes four registers as one value; a sum that cancels keeps the rounding of its terms."""
    one = np.array([[1e3, 2.0, 1e-4, 0.0]], np.float32)
    near, far = (one + np.array([[0, 0, change, 0]], np.float32) for change in (1e-6, 1.0))
    vector = [(each.view(np.complex128)[:, 0]) for each in (one, near, far)]
    assert nearly_equal(vector[0], vector[1], 1).tolist() == [True]
    assert nearly_equal(vector[0], vector[2], 1).tolist() == [False]
    for bits, same in ((0x3F80, True), (0x3C00, True), (100, False), (0, False)):  # 1 in bf16 and fp16, and integers
        assert nearly_equal(np.array([bits], np.uint16), np.array([bits + 2], np.uint16), 1).tolist() == [same]
