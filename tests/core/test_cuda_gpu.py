"""The timers on a real card: whether they agree with each other and with what a card can do."""

import pytest
import torch

from rooflab.bench.core.environment import Environment
from rooflab.bench.core.noise import why_invalid
from rooflab.bench.core.settings import TIMERS
from rooflab.bench.core.timers.card import ClockWatch
from rooflab.bench.core.timers.cupti import names
from rooflab.bench.core.timers.sm_clock import DeviceClock, sm_clock_under_load
from rooflab.bench.core.timers.timing import time_functions, timer_for
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
    for timer in ("events", "cupti"):
        read = time_functions({"cached": lambda: None, "mm": product}, "cuda", budget_s=0.2, timer=timer)["cached"]
        assert read.fault or not read.resolved or read.median_s < read.launch_floor_s, timer
    with pytest.raises(ValueError, match="UNSUPPORTED: cached cannot be captured.*nothing on the current stream"):
        time_functions({"cached": lambda: None}, "cuda", budget_s=0.1, timer="graph")


def test_a_function_that_waits_for_the_device_is_refused_by_the_graph_and_the_next_one_is_not(product):
    def waits():
        product()
        torch.cuda.synchronize()

    with pytest.raises(ValueError, match="UNSUPPORTED: waits cannot be captured in a CUDA graph"):
        time_functions({"waits": waits}, "cuda", budget_s=0.1, timer="graph")
    assert torch.randn(8, device="cuda").isfinite().all(), "torch's generator is out of the capture"
    assert time_functions({"mm": product}, "cuda", budget_s=0.1, timer="graph")["mm"].median_s > 0
    assert "included" in time_functions({"waits": waits}, "cuda", budget_s=0.2)["waits"].method


def test_cupti_sees_the_kernels_and_not_ours(product):
    timer = timer_for(DEVICE, "cupti")
    functions = {"two": lambda: (product(), product()), "one": product}
    read = time_functions(functions, "cuda", budget_s=0.6, timer=timer)
    two, one = (names(timer.traced[name][-1]) for name in functions)
    assert two == one * 2 and not any("spin" in name for name in one)
    assert 0 < read["one"].busy_s <= 1.02 * read["one"].median_s


def test_the_device_reads_its_own_clock(product):
    gpu = Environment.now().gpu
    top_hz = 1e6 * (gpu.max_sm_clock_mhz or 3000)
    assert 0.2 * top_hz < sm_clock_under_load(DEVICE) < 1.02 * top_hz
    with ClockWatch(gpu.uuid, DeviceClock(DEVICE)) as watch:
        time_functions({"mm": product}, "cuda", budget_s=0.3, observe=watch.read)
    low, high = watch.summary()["sm_clock_range_hz"]
    assert 0.2 * top_hz < low <= watch.summary()["sm_clock_hz"] <= high < 1.02 * top_hz


def test_all_methods_read_plausible_times_that_agree_on_a_long_kernel(product, small):
    medians = []
    for timer in TIMERS["cuda"]:
        read = time_functions({"mm": product, "small": small}, "cuda", budget_s=0.5, timer=timer)
        for name, samples in read.items():
            assert samples.fault == "" and samples.resolved, (name, samples)
            assert samples.method.startswith("cuda ") and "launch gaps hidden" in samples.method
            assert why_invalid(samples, Cost(0, 0), None) is None
        assert 2 * SIZE**3 / read["mm"].median_s < 2.5e15
        assert read["small"].median_s < read["mm"].median_s and read["mm"].l2_state == "cold"
        assert 2e-7 < read["mm"].launch_floor_s < 2e-5
        medians.append(read["mm"].median_s)
    assert max(medians) < 1.15 * min(medians), dict(zip(TIMERS["cuda"], medians, strict=True))
