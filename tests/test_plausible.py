import math
from dataclasses import replace

import pytest

from rooflab.bench.timing.plausible import CAUSES, above_limits, implausible
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Ceilings, Cost

CEILINGS = Ceilings("a card", "at_clock", 1e12, {"bf16": 1e15}, 1e13, sfu_ops_per_s=1e12, launch_floor_s=1e-6)
EVENTS = "cuda events, launch gaps hidden"


L2 = replace(CEILINGS, l2_bytes_per_s=5e12, launch_floor_s=0.0)


def judge(seconds, cost=None, limits=None, **options):
    return implausible(seconds, cost, limits, **({"method": EVENTS} | options))


def test_a_plausible_reading_is_none():
    cost = Cost(1e9, 1e6, {"bf16": 1e12}, 1e9, 1e8)
    clocks = {"throttled": [], "throttle_names": ["software power cap"]}
    assert judge(2e-3, cost, CEILINGS, launch_floor_s=3e-6, samples=[2e-3, 3e-3], clocks=clocks) is None
    assert judge(1e-3 / 1.04, cost, CEILINGS) is None, "a little above the roof is noise"


@pytest.mark.parametrize(
    ("cost", "part", "times"),
    [
        (Cost(3e9, 0), "memory", "3.00"),
        (Cost(0, 0, {"bf16": 2e12}), "tensor", "2.00"),
        (Cost(0, 0, vector_flops=4e10), "vector", "4.00"),
        (Cost(0, 0, sfu_ops=5e9), "sfu", "5.00"),
        (Cost(0, 0, launches=2000), "launch", "2.00"),
    ],
)
def test_above_a_rate_of_the_card_is_named_with_its_cause(cost, part, times):
    reason = judge(1e-3, cost, CEILINGS)
    assert reason == f"{times} times the {part} ceiling; likely cause: {CAUSES[part]}"


def test_the_physical_roof_of_a_real_card_is_at_its_highest_clock():
    h200 = get_device("h200")
    cost = Cost(0, 0, {"bf16": 989.4e12})
    assert judge(1.0 / 1.08, cost, h200.ceilings(h200.max_clock_hz)) is None, "1980 MHz, not the stated 1830"
    assert "tensor ceiling" in judge(1.0 / 1.14, cost, h200.ceilings(h200.max_clock_hz))


def test_bytes_below_the_rate_of_l2_were_never_moved():
    cost = Cost(6e9, 6e9)
    assert judge(2e-3, cost, L2, l2_state="warm").startswith("1.20 times the L2 ceiling; likely cause: kernels were")
    assert judge(3e-3, cost, L2, l2_state="warm") is None, "L2 may have held all of it"
    assert judge(3e-3, cost, CEILINGS, l2_state="warm") is None, "and without a rate of L2 nothing is known"


def test_a_cold_cache_holds_what_is_written_and_nothing_that_is_read():
    assert judge(1e-3, Cost(1e8, 1e12), CEILINGS, l2_state="cold") is None
    assert "2.00 times the memory ceiling" in judge(1e-3, Cost(2e9, 0), CEILINGS, l2_state="cold")


def test_on_a_cpu_every_byte_counts():
    slow = Ceilings("this", "measured", 1e9, {"fp32": 1e9}, 1e9)
    assert "2.00 times the memory ceiling" in judge(1.0, Cost(1e9, 1e9), slow, method="cpu perf_counter")


def test_a_dtype_without_a_rate_bounds_nothing_and_the_rest_still_does():
    assert judge(1e-3, Cost(1e6, 0, {"fp8_e4m3": 1e15}), CEILINGS) is None
    assert "memory" in judge(1e-3, Cost(1e10, 0, {"fp8_e4m3": 1e15}), CEILINGS)


def test_below_what_an_empty_kernel_takes_nothing_was_launched():
    reason = judge(1e-6, launch_floor_s=2.4e-6)
    assert reason.startswith("1.00 us is below the 2.40 us that an empty kernel takes by cuda events")
    assert "cached answer" in reason
    assert judge(2.35e-6, launch_floor_s=2.4e-6) is None and judge(1e-6) is None


@pytest.mark.parametrize("seconds", [0.0, -1e-6])
def test_a_timer_of_zero_stands_still(seconds):
    assert "likely cause: the clock stands still, or nothing was launched" in judge(seconds, samples=[seconds] * 3)
    assert "timer read" in judge(1e-3, samples=[1e-3, -1e-3])


def test_samples_that_are_no_numbers_are_counted():
    assert judge(1e-3, samples=[1e-3, math.nan, math.inf]).startswith("2 readings are not finite")
    assert judge(math.nan).startswith("1 readings are not finite")


def test_a_throttled_card_is_named_with_its_reason():
    clocks = {"throttled": ["power brake", "hardware thermal slowdown"]}
    assert judge(1e-3, clocks=clocks).startswith("the card was throttled (power brake, hardware thermal slowdown)")


def test_the_part_furthest_above_is_the_one_reported():
    above = above_limits(1e-3, Cost(2e9, 0, {"bf16": 5e12}), CEILINGS, method=EVENTS)
    assert above.part == "tensor" and above.times == pytest.approx(5.0)
    assert above_limits(1e-3, Cost(12e9, 0), L2, method=EVENTS).part == "memory"
