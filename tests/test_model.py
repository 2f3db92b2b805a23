"""The roofline model's arithmetic."""

import pytest

from rooflab.roofline.model import Ceilings, Cost, Traffic, bound

CEILINGS = Ceilings("toy", "datasheet", 100.0, {"bf16": 1000.0, "fp32": 50.0}, 50.0, 10.0, 0.5)


def test_cost_sums_both_directions_and_all_flops() -> None:
    cost = Cost(30, 20, {"bf16": 400.0}, vector_flops=100.0, sfu_ops=7.0)
    assert (cost.bytes, cost.flops, cost.intensity) == (50, 500.0, 10.0)
    assert Traffic(30, 20).bytes == 50


def test_costs_add_by_part() -> None:
    total = Cost(1, 2, {"bf16": 3.0}, 4.0, 5.0) + Cost(10, 20, {"bf16": 30.0, "fp32": 7.0}, 40.0, 50.0, 2)
    assert total == Cost(11, 22, {"bf16": 33.0, "fp32": 7.0}, 44.0, 55.0, 3)


def test_adding_changes_neither_side() -> None:
    flops = {"bf16": 1.0}
    Cost(1, 1, flops) + Cost(1, 1, {"bf16": 2.0})
    assert flops == {"bf16": 1.0}


@pytest.mark.parametrize(
    ("cost", "seconds", "limiter"),
    [
        (Cost(150, 50), 2.0, "memory"),
        (Cost(1, 1, {"bf16": 3000.0}), 3.0, "tensor"),
        (Cost(1, 1, {"bf16": 1000.0, "fp32": 100.0}), 3.0, "tensor"),
        (Cost(1, 1, vector_flops=200.0), 4.0, "vector"),
        (Cost(1, 1, sfu_ops=50.0), 5.0, "sfu"),
        (Cost(1, 1, launches=3), 1.5, "launch"),
    ],
)
def test_bound_is_the_largest_part(cost: Cost, seconds: float, limiter: str) -> None:
    least = bound(cost, CEILINGS)
    assert (least.seconds, least.limiter) == (seconds, limiter)
    assert least.fraction(2 * seconds) == 0.5


def test_an_unknown_special_function_rate_bounds_nothing() -> None:
    ceilings = Ceilings("toy", "measured", 100.0, {}, 50.0)
    least = bound(Cost(100, 0, sfu_ops=1e9), ceilings)
    assert (least.seconds, least.limiter) == (1.0, "memory")
    assert "sfu" not in least.parts


def test_a_dtype_without_a_rate_is_named() -> None:
    with pytest.raises(ValueError, match="toy has no datasheet matrix rate for 'fp8_e4m3'; known: bf16, fp32"):
        bound(Cost(1, 1, {"fp8_e4m3": 1.0}), CEILINGS)


def test_the_roof_bends_at_the_ridge() -> None:
    ridge = CEILINGS.ridge("bf16")
    assert ridge == 10.0
    assert CEILINGS.attainable_flops_per_s(ridge / 2, "bf16") == 500.0
    assert CEILINGS.attainable_flops_per_s(ridge * 2, "bf16") == 1000.0
