"""Counted traffic: torch's calls on `meta` tensors give the same bytes as the same calls that compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_kernels import own_registry  # noqa: F401

from rooflab.kernels import registry, traffic
from rooflab.kernels.launcher import kernel as launcher
from rooflab.kernels.registry import Kernel
from rooflab.kernels.traffic import TorchCall, calls_of, counted, held
from rooflab.reference.spec import Inputs, get_scheme

COUNTED = [
    kernel
    for op in registry.ops()
    for kernel in registry.kernels(op).values()
    if kernel.traffic == "counted" and "cpu" in kernel.devices
]
CHECKED_HERE = 0.002
"""On a CPU the kernels of sample first look at a column of the logits: at most this share of their bytes."""


def moved(calls: list[TorchCall]) -> tuple[int, int]:
    return sum(held(x) for call in calls for x in call.read), sum(held(x) for call in calls for x in call.written)


def small(kernel: Kernel, seed: int = 0) -> Inputs:
    spec = registry.get_op(kernel.op)
    return spec.make_inputs(spec.cases["smoke"][-1], get_scheme(spec.schemes[0]), torch.device("cpu"), seed)


@pytest.mark.parametrize("kernel", COUNTED, ids=lambda kernel: kernel.id)
def test_calls_on_meta_tensors_move_what_they_move_when_they_compute(kernel: Kernel, monkeypatch: Any) -> None:
    """A count computes with copies of slots and lengths, and writes nothing of the caller's."""
    inputs, before = small(kernel), small(kernel)
    if refusal := kernel.why_not_args(inputs):
        assert "oneDNN does not multiply bf16 on this CPU" in str(refusal)
        pytest.skip("oneDNN does not multiply bf16 on this CPU")
    said = kernel.traffic_of(inputs, "cpu")
    torch.testing.assert_close(inputs, before, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(traffic, "MAX_KEPT_ELEMENTS", 10**12)  # now every tensor keeps its values
    computed = calls_of(lambda: kernel(**inputs), "cpu")
    assert said is not None and said.bytes >= registry.get_op(kernel.op).cost_of(inputs).bytes
    read, written = moved(computed)
    if kernel.op == "sample":
        assert (said.read_bytes, said.write_bytes) == pytest.approx((read, written), rel=CHECKED_HERE)
    else:
        assert (said.read_bytes, said.write_bytes, said.launches) == (read, written, len(computed))


def test_a_view_moves_nothing_and_rows_count_as_they_are_taken_or_put() -> None:
    x, slots = torch.empty(100, 8, device="meta"), torch.tensor([3, 3, 70])
    assert calls_of(lambda: (x[2:5], x.mT, x.view(-1), torch.empty_like(x), x.expand(2, 100, 8))) == []
    row, rows = 8 * 4, torch.empty(3, 8, device="meta")
    for touch in (
        lambda: x[slots],
        lambda: x.index_select(0, slots),
        lambda: F.embedding(slots, x),
        lambda: x.index_copy_(0, slots, rows),
        lambda: x.__setitem__(slots, rows),
    ):
        assert moved(calls_of(touch)) == (3 * row + 24, 3 * row)
    kept = torch.arange(100) < 5
    assert moved(calls_of(lambda: x[kept])) == (5 * row + 100, 5 * row)


def test_what_is_broadcast_counts_once_and_the_target_of_a_call_is_not_read() -> None:
    x, row = torch.empty(10, 8, device="meta"), torch.empty(8, device="meta")
    assert moved(calls_of(lambda: x * row)) == (320 + 32, 320)
    assert moved(calls_of(lambda: torch.mul(row.expand(10, 8), 2.0, out=x))) == (32, 320)
    assert moved(calls_of(lambda: x.mul_(row))) == (320 + 32, 320)
    assert moved(calls_of(lambda: x.copy_(row))) == (32, 320)


@pytest.mark.usefixtures("own_registry")
def test_a_kernel_from_elsewhere_is_counted_if_it_asks_for_it_and_takes_the_inputs() -> None:
    """Its code may take addresses, which `meta` tensors do not have."""

    def asking(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    x = torch.empty(4, 8, device="meta")
    launcher(op="softmax", backend="torch", traffic="counted", limits={"H": 8})(asking)
    kernel = registry.get_kernel("softmax", "asking")
    assert replace(kernel, traffic=None).traffic_of({"x": x}) is None
    assert kernel.traffic_of({"x": x}) == counted(asking, {"x": x}, "cuda")
    assert kernel.traffic_of({"x": torch.empty(4, 9, device="meta")}) is None
