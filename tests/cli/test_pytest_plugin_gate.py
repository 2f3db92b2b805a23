"""The gate of the fixture `kernel_benchmark`, and what it says of a reading."""

import math

import pytest
import torch

from rooflab.bench.core import functions as fixture
from rooflab.bench.core import measure
from rooflab.bench.core.noise import Samples
from rooflab.bench.core.record import unpack_samples
from rooflab.bench.core.timers import Observed
from rooflab.bench.plugin import timing as plugin_timing
from rooflab.roofline.model import Ceilings, Cost, Traffic

X = torch.tensor([1.0, -2.0, 0.0])


@pytest.mark.parametrize(
    ("actual", "expected", "passes"),
    [
        (X, X.double(), True),
        (X * (1 + 1e-6), X.double(), True),
        (X * (1 + 1e-4), X.double(), False),
        ((X * 1.01).bfloat16(), X.double(), True),
        ((X * 1.1).bfloat16(), X.double(), False),
        (X * math.nan, X * math.nan, False),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.0]), True),
        (torch.tensor([1e30, 1.0]), torch.tensor([math.inf, 1.0]), False),
        (torch.tensor([1, 3]), torch.tensor([1, 2]), False),
        (torch.zeros(3, 1), torch.zeros(1, 3), False),
        ((X, X), (X, X + 1), False),
        ((X, X), [X, X], True),
    ],
)
def test_the_gate_passes_what_is_right_to_a_few_roundings(actual, expected, passes):
    assert all(stats.passed for stats in fixture.judge(actual, expected)) is passes


def test_what_cannot_be_compared_is_named():
    for actual, expected, text in (
        (None, X, "fn: expected a tensor or a tuple of tensors, got NoneType"),
        (X, 3.0, "reference: expected a tensor or a tuple of tensors, got float"),
        (X.half(), X, "output 0: expected torch.float32, as from the reference, got torch.float16"),
        ((X, X), X, "fn: expected 1 outputs, as from the reference, got 2"),
    ):
        with pytest.raises(ValueError, match=text):
            fixture.judge(actual, expected)


def test_neither_side_of_the_gate_changes_the_callers_tensors():
    x = torch.ones(4)
    checked = fixture.Checked.of(lambda x: x.add_(1), [x], lambda x: x.add_(1))
    assert torch.equal(x, torch.ones(4)) and torch.equal(checked.result, torch.full((4,), 2.0))
    assert checked.fault == "" and not checked.interpreted


CEILINGS = Ceilings("this", "datasheet", 1e9, {"fp32": 1e9}, 1e9)
COST = Cost(512, 256, {"fp32": 1024.0})


@pytest.fixture
def info(monkeypatch):
    """What is said of a reading whose ceilings are known."""
    monkeypatch.setattr(measure, "ceilings_for", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "observe", lambda ready, device: ({"fn": Observed(None, ("k1", "k2"), "abc")}, {}))
    checked = fixture.Checked.of(torch.neg, [torch.ones(4)], None)

    def of(seconds, cost=COST, clocks=None, **options):
        samples = Samples((seconds,) * 3, "cuda events, launch gaps hidden", "cold", **options)
        monkeypatch.setattr(measure, "time_together", lambda ready, *_: ({"fn": samples}, {}, clocks))
        timed = plugin_timing.time_kernel(checked, cost, budget_s=1.0, min_samples=3)
        return plugin_timing.extra_info(timed, cost)

    return of


def test_a_reading_has_its_roofs_its_clocks_its_samples_and_the_devices_kernels(info):
    found = info(2e-6, clocks={"sm_clock_mhz": [1700, 1755]})
    assert found["status"] == "OK" and found["clocks"] == {"sm_clock_mhz": [1700, 1755]}
    assert found["fraction_of_datasheet_roof"] == pytest.approx(1.024e-6 / 2e-6)
    assert found["fraction_of_datasheet_memory_roof"] == pytest.approx(0.768e-6 / 2e-6)
    assert found["intensity_flop_per_byte"] == pytest.approx(1024 / 768) and found["limiter"] == "tensor"
    assert unpack_samples(found["samples"]) == [2e-6] * 3
    noisy = info(2e-6, noise="the machine was busy")
    assert noisy["status"] == "NOISY: the machine was busy" and "flops_per_s" not in noisy
    assert info(1e-7)["status"].startswith("INVALID: 10.24 times the tensor ceiling"), "causes: test_reading.py"
    assert info(2e-6, launch_floor_s=5e-6)["status"].startswith("INVALID: 2.00 us is below the 5.00 us that an empty")
    assert info(2e-6, clocks={"throttled": ["hardware slowdown"]})["status"].startswith("INVALID: the card was thro")
    assert found["device_kernels"] == ["k1", "k2"] and found["activity_hash"] == "abc" and found["machine_key"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["read_bytes", "write_bytes", "launches"])
def test_an_amount_that_counts_no_work_is_refused_where_it_enters(name, bad):
    amounts = {"read_bytes": 1, "write_bytes": 0, name: bad}
    for kind in (Cost, Traffic):
        with pytest.raises(ValueError, match=f"^{name}: expected a finite number from 0 on, got {bad}$"):
            kind(**amounts)
    with pytest.raises(ValueError, match=r"^tensor_flops\['fp32'\]: expected a finite number"):
        Cost(1, 1, {"fp32": bad})
