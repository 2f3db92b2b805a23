"""Measures a GPU's ceilings on a fake device: which launches are timed, which count, and which faults are found."""

import itertools
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from rooflab.bench.core.ceilings import MachineLimits, assemble, value_of
from rooflab.bench.core.ceilings import cuda_limits as module
from rooflab.bench.core.ceilings.cuda_limits import measure_cuda
from rooflab.bench.core.ceilings.microkernel import Card, Microkernel
from rooflab.bench.core.environment import Environment, Gpu
from rooflab.bench.core.noise import Samples
from rooflab.bench.core.record import Record
from rooflab.kernels import _cuda
from rooflab.kernels._cuda import CudaCompileError

CARD = Card(torch.device("cpu"), sm=90, sms=132, l2_bytes=2**20)
CUDA = torch.device("cuda")
GPU = Gpu("NVIDIA H200", "GPU-1", 141 * 10**9, 132, 60 * 2**20, "580.1", 1980, 3201, 700.0, True, False)
ON_H200 = replace(Environment.now(), gpu=GPU, machine_key="nvidia-h200-16c-00000000")


class World:
    """A device whose launches take as long as their work says, and a timer that reads its clock."""

    def __init__(self):
        self.now = 0.0
        self.launches = []
        self.timed = []
        self.fault = ""

    def kernel(self, limit="hbm_read", rate=1e12, work=1e6, *, wrong="", seconds=None, **fields):
        """Its check raises an error that is given as `wrong`, or gives the next of several answers."""
        answers = iter(wrong) if isinstance(wrong, list) else itertools.repeat(wrong)

        def launch(repeats):
            self.launches.append((limit, repeats))
            self.now += seconds if seconds is not None else repeats * work / rate

        def check(repeats):
            if isinstance(wrong, Exception):
                raise wrong
            launch(repeats)
            return next(answers)

        return Microkernel(limit, {"rate": rate}, work, launch, check, **fields)

    def time(self, functions, device, *, min_samples, budget_s, cold, observe=None):
        self.timed.append((sorted(functions), cold))
        found = {}
        for name, function in functions.items():
            began = self.now
            function()
            took = 2e-6 if name == "nothing" else self.now - began
            found[name] = Samples((took * 1.1, took, took), "fake events", "cold" if cold else "warm", fault=self.fault)
        return found


@pytest.fixture
def world():
    return World()


def measure(world, monkeypatch, *groups, makers=None, budget_s=10.0, gpu=None):
    load = lambda source, name, *, options=(): lambda grid, block, *arguments, shared_bytes=0: None
    monkeypatch.setattr(module, "KERNEL_MAKERS", makers or (lambda card, load: iter(groups),))
    monkeypatch.setattr(module, "card_of", lambda device: CARD)
    monkeypatch.setattr(module, "time_functions", world.time)
    monkeypatch.setattr(_cuda, "load", load)
    *found, floor = measure_cuda(CARD.device, replace(Environment.now(), gpu=gpu), budget_s)
    assert floor.kernel == "launch events" and (floor.status == "OK" or floor.reason == world.fault)
    assert value_of(floor) == (None if world.fault else 2e-6)
    return found


def test_the_fastest_shape_counts_and_all_are_kept(world, monkeypatch):
    slow, fast = (world.kernel(rate=rate, work=1e9, fixed_repeats=2) for rate in (1e12, 3e12))
    readings = measure(world, monkeypatch, [slow, fast])
    assert [reading.status for reading in readings] == ["OK", "OK"]
    assert [value_of(reading) for reading in readings] == pytest.approx([1e12, 3e12])
    assert MachineLimits(readings).best()["hbm_read"].config == {"rate": 3e12}
    assert len(readings[0].samples_s) == 3 and readings[0].timer == "fake events" and readings[0].l2_state == "cold"


@pytest.mark.parametrize("rate", [1e9, 1e12, 1e15])
def test_a_launch_is_long_enough_to_hide_its_overhead(world, monkeypatch, rate):
    """Found by probes, whatever the device's speed; even, so that half of it is half of the work."""
    (reading,) = measure(world, monkeypatch, [world.kernel("fma", rate, 100.0)])
    (_, whole), (_, half) = world.launches[-3:-1]
    assert whole % 2 == 0 and half == whole // 2 and world.launches[-1] == ("fma", whole), "checked as it was timed"
    assert reading.metrics["work"] == whole * 100.0
    assert value_of(reading) == pytest.approx(rate)
    assert whole == 2 or module.TARGET_LAUNCH_S / 2 <= reading.latency_median_ms / 1e3 <= 3 * module.TARGET_LAUNCH_S


def test_a_rate_that_the_card_cannot_have_is_found_out(world, monkeypatch):
    groups = [
        [world.kernel("hbm_read", 6e12)],
        [world.kernel("hbm_copy", 4.6e12)],
        [world.kernel("l2_read", 9e12)],
        [world.kernel("bf16 wgmma shared", 1979e12, dtype="bf16")],
    ]
    found = {r.kernel: r for r in measure(world, monkeypatch, *groups, gpu=GPU)}
    assert found["hbm_read"].status == "INVALID" and found["hbm_read"].reason.startswith("1.25 times what the card")
    assert found["hbm_copy"].status == "OK" and found["l2_read"].status == "OK", "no data sheet has L2's rate"
    assert found["bf16 wgmma shared"].status == "INVALID", "the rate of sparse products"


def test_a_throttled_card_and_a_replaced_clock_spoil_the_reading(world, monkeypatch):
    watch = MagicMock()
    watch.return_value.__enter__.return_value.summary.return_value = {"throttled": ["power brake"]}
    monkeypatch.setattr("rooflab.bench.core.timers.card.ClockWatch", watch)
    (reading,) = measure(world, monkeypatch, [world.kernel()], gpu=GPU)
    watch.assert_called_once_with("GPU-1")
    assert reading.status == "INVALID" and reading.reason == "the card was throttled (power brake)"
    monkeypatch.undo()
    world.fault = "time.perf_counter was replaced"
    (reading,) = measure(world, monkeypatch, [world.kernel()])
    assert reading.status == "INVALID" and reading.reason == world.fault


BROKEN = CudaCompileError("kernel.cu(3): error: no wgmma here\n  more")
SPOILED = {
    "the words add up to 3": ("INCORRECT", {"wrong": "the words add up to 3"}),
    "sums differ": ("INCORRECT", {"wrong": ["", "sums differ"]}),  # after the timing
    "NVRTC: kernel.cu(3): error: no wgmma here": ("COMPILE_ERROR", {"wrong": BROKEN}),
    "CUDA_ERROR_INVALID_VALUE": ("RUNTIME_ERROR", {"wrong": RuntimeError("CUDA_ERROR_INVALID_VALUE")}),
    # As when a compiler has moved the work out of the loop.
    "half of the work took 100% of the time; likely cause: a compiler left work out": ("INVALID", {"seconds": 5e-3}),
}


def test_a_spoiled_reading_has_no_rate_and_takes_no_other_with_it(world, monkeypatch):
    kernels = [world.kernel(**how) for _, how in SPOILED.values()]
    *found, right, other = measure(world, monkeypatch, [*kernels, world.kernel(rate=1e12)], [world.kernel("fma")])
    assert {one.reason: one.status for one in found} == {why: status for why, (status, _) in SPOILED.items()}
    assert all(value_of(one) is None for one in found) and right.status == other.status == "OK"
    assert MachineLimits([*found, right]).best()["hbm_read"] == right


def reading(limit, rate=1e12, *, dtype=None, status="OK", seconds=(1.0, 1.0), clock_hz=None, **fields):
    """The record of one launch shape on an H200, with this rate, or with these times of a launch."""
    unit, _ = module.kind_of(limit)
    metrics = {"work": rate * seconds[0] if seconds else 0.0}
    metrics |= {"sm_clock_hz": clock_hz} if clock_hz else {}
    if status == "OK":
        metrics |= {"s": {"launch_floor_s": min(seconds)}, "op/s": {"ops_per_s": rate}}.get(unit, {})
    return Record(
        kind="ceiling",
        run_id=fields.pop("run_id", "r"),
        status=status,
        reason=fields.pop("reason", "" if status == "OK" else "why"),
        **(ON_H200.record_fields() | {"environment": ON_H200.to_dict() | {"microkernels": module.microkernels_hash()}}),
        kernel=limit,
        scheme=dtype,
        config={"threads": 256},
        backend="cuda",
        device="cuda",
        basis="measured" if seconds else "bound",
        latency_median_ms=1e3 * seconds[0] if seconds else None,
        samples=Record.packed(seconds) if seconds else None,
        bytes_per_s=rate if unit == "B/s" and status == "OK" else None,
        flops_per_s=rate if unit == "FLOP/s" and status == "OK" else None,
        metrics=metrics,
        **fields,
    )


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_ceilings_are_the_best_of_what_counts(hopper):
    readings = [
        reading("hbm_read", 4e12),
        reading("hbm_copy", 4.2e12),
        reading("hbm_triad", 4.1e12, status="INVALID", reason="throttled"),
        reading("l2_read", 6e12),
        reading("l2_write", 5e12),
        reading("fma", 60e12),
        reading("ex2", 4e12),
        reading("rsqrt", 3.9e12),
        reading("bf16 wgmma shared", 800e12, dtype="bf16"),
        reading("bf16 wgmma registers", 810e12, dtype="bf16"),
        reading("bf16 mma.sync", 500e12, dtype="bf16"),
        reading("launch events", seconds=(3e-6, 2e-6)),
        reading("launch graph", seconds=(1e-6,)),
    ]
    found, reason = assemble(readings, CUDA)
    assert reason == "" and found.kind == "measured" and found.device == "h200"
    assert found.hbm_bytes_per_s == 4.2e12 and found.access_bytes_per_s == {"read": 4e12, "copy": 4.2e12}
    assert found.l2_bytes_per_s == 6e12 and found.sfu_ops_per_s == 4e12
    assert found.tensor_flops_per_s == {"bf16": 810e12, "fp32": 60e12} and found.vector_flops_per_s == 60e12
    assert found.launch_floor_s == 1e-6 and found.launch_floors_s == {"events": 2e-6, "graph": 1e-6}
