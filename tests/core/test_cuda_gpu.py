"""The timer on a real card: whether it agrees with what a card can do, and what CUPTI sees of a call."""

import pytest
import torch

from rooflab.bench.core.environment import Environment
from rooflab.bench.core.noise import why_invalid
from rooflab.bench.core.timers.activity import observed
from rooflab.bench.core.timers.card import ClockWatch
from rooflab.bench.core.timers.cuda import CudaCalls
from rooflab.bench.core.timers.sm_clock import DeviceClock, sm_clock_under_load
from rooflab.bench.core.timers.timing import time_functions
from rooflab.roofline.model import Cost

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SIZE = 4096


@pytest.fixture(scope="module")
def product():
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


@pytest.fixture(scope="module")
def small():
    a = torch.randn(64, device="cuda")
    out = torch.empty_like(a)
    return lambda: torch.add(a, 1.0, out=out)


def test_nothing_launched_is_below_the_floor(product):
    read = time_functions({"cached": lambda: None, "mm": product}, "cuda", budget_s=0.2)["cached"]
    assert read.fault or not read.resolved or read.median_s < read.launch_floor_s


def test_a_function_that_waits_for_the_device_is_named_so(product):
    def waits():
        product()
        torch.cuda.synchronize()

    assert "included" in time_functions({"waits": waits}, "cuda", budget_s=0.2)["waits"].method


def test_cupti_sees_the_kernels_of_a_call(product):
    seen = [observed(call, CudaCalls(DEVICE)) for call in (product, product, lambda: (product(), product()))]
    one, again, two = ((each["device_kernels"], each["activity_hash"]) for each in seen)
    assert one[0] and one == again and two[0] == one[0] * 2 and two[1] != one[1]


def test_the_device_reads_its_own_clock(product):
    gpu = Environment.now().gpu
    top_hz = 1e6 * (gpu.max_sm_clock_mhz or 3000)
    assert 0.2 * top_hz < sm_clock_under_load(DEVICE) < 1.02 * top_hz
    with ClockWatch(gpu.uuid, DeviceClock(DEVICE)) as watch:
        time_functions({"mm": product}, "cuda", budget_s=0.3, observe=watch.read)
    low, high = watch.summary()["sm_clock_range_hz"]
    assert 0.2 * top_hz < low <= watch.summary()["sm_clock_hz"] <= high < 1.02 * top_hz


def test_the_times_of_a_long_and_a_short_kernel_are_plausible(product, small):
    read = time_functions({"mm": product, "small": small}, "cuda", budget_s=0.5)
    for name, samples in read.items():
        assert samples.fault == "" and samples.resolved, (name, samples)
        assert samples.method.startswith("cuda ") and "launch gaps hidden" in samples.method
        assert why_invalid(samples, Cost(0, 0), None) is None
    assert 2 * SIZE**3 / read["mm"].median_s < 2.5e15
    assert read["small"].median_s < read["mm"].median_s and read["mm"].l2_state == "cold"
    assert 2e-7 < read["mm"].launch_floor_s < 2e-5
